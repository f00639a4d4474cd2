// Products, attention and whole decode steps for a few rows on a CPU, where reading the weights takes most of the time: each weight
// is read once, by all threads, at the speed of memory. Plain C functions on plain pointers. native.py compiles this file.
//
// The order of every sum is independent of the other rows, of the columns and of the number of threads: a row's results have the
// same bits alone and in a batch. This holds for the functions here. A whole model also uses torch: for products of many rows (oneDNN)
// and for attention over whole texts whose head width is no multiple of 16; there the last bits depend on the batch.

#include "cpp/decode_step.h"
#include "cpp/draw.h"
#include "cpp/linear.h"
#include "cpp/paged_attention.h"
#include "cpp/quantize.h"
#include "cpp/text_attention.h"
#include "cpp/top_log_probs.h"
