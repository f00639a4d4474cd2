// Products, attention and whole steps for a few rows on a CPU, where reading the weights takes the time: each is read once, by
// all threads, at the speed of the memory. Plain C functions on plain pointers; native.py compiles this file on first use.
//
// Every result is summed in an order that knows nothing of the other rows, columns and threads: a row gives the same bits alone
// and in a batch.

#include "cpp/attention.h"
#include "cpp/pack.h"
#include "cpp/products.h"
#include "cpp/step.h"
#include "cpp/texts.h"
