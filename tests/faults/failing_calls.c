// Preloaded into a process: the n-th call that changes a file below a folder, or maps one, fails, or kills the process.
//
// Calls are those of the C library, so that writes of Python, of torch and of compiled libraries are all counted.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long count, target;
static int error, lasts, is_armed;

// Calls from now on are counted. error 0: SIGKILL in place of a failure. lasts: all calls after it fail, too.
void faults_arm(const char* where, long n, int number, int lasting) {
    strncpy(folder, where, sizeof folder - 1);
    count = 0, target = n, error = number, lasts = lasting, is_armed = 1;
}

long faults_count(void) { return count; }

static int is_inside(const char* path) { return is_armed && path && !strncmp(path, folder, strlen(folder)); }

static int is_inside_file(int file) {
    char link[64], path[PATH_MAX];
    if (!is_armed || file < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return is_inside(path);
}

static int fails(void) {
    long n = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    if (n != target && !(lasts && n > target)) return 0;
    if (!error) kill(getpid(), SIGKILL);
    errno = error;
    return 1;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define ON_FILE(type, name, params, ...) \
    type name params { REAL(name); return is_inside_file(file) && fails() ? (type)-1 : real(__VA_ARGS__); }
#define ON_PATH(name, params, path, ...) \
    int name params { REAL(name); return is_inside(path) && fails() ? -1 : real(__VA_ARGS__); }

ON_FILE(ssize_t, write, (int file, const void* from, size_t n), file, from, n)
ON_FILE(ssize_t, pwrite, (int file, const void* from, size_t n, off_t at), file, from, n, at)
ON_FILE(ssize_t, pwrite64, (int file, const void* from, size_t n, off64_t at), file, from, n, at)
ON_FILE(ssize_t, writev, (int file, const struct iovec* parts, int n), file, parts, n)
ON_FILE(int, fsync, (int file), file)
ON_FILE(int, fdatasync, (int file), file)
ON_FILE(int, ftruncate, (int file, off_t n), file, n)
ON_FILE(int, ftruncate64, (int file, off64_t n), file, n)
ON_PATH(rename, (const char* a, const char* b), b, a, b)
ON_PATH(link, (const char* a, const char* b), b, a, b)
ON_PATH(linkat, (int x, const char* a, int y, const char* b, int how), b, x, a, y, b, how)
ON_PATH(unlink, (const char* path), path, path)
ON_PATH(mkdir, (const char* path, mode_t mode), path, path, mode)
ON_PATH(rmdir, (const char* path), path, path)

#define ON_OPEN(name) \
    int name(const char* path, int how, ...) { \
        REAL(name); \
        va_list rest; va_start(rest, how); int mode = va_arg(rest, int); va_end(rest); \
        return (how & (O_WRONLY | O_RDWR | O_CREAT)) && is_inside(path) && fails() ? -1 : real(path, how, mode); \
    }
ON_OPEN(open)
ON_OPEN(open64)

void* mmap(void* at, size_t n, int may, int how, int file, off_t from) {
    REAL(mmap);
    return is_inside_file(file) && fails() ? MAP_FAILED : real(at, n, may, how, file, from);
}

void* mmap64(void* at, size_t n, int may, int how, int file, off64_t from) {
    REAL(mmap64);
    return is_inside_file(file) && fails() ? MAP_FAILED : real(at, n, may, how, file, from);
}
