// The devices that the stub claims to have: 0 is an H100 SXM, 1 an A100. Their memory is the host's.
#pragma once
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

enum {
  CUDA_VERSION_SAID = 13000,
  WARP = 32,
  MAX_THREADS_PER_BLOCK = 1024,
  MAX_THREADS_PER_SM = 2048,
  REGISTERS = 65536,
  SHARED_PER_BLOCK = 49152,
  L2_BYTES = 50 << 20,
};

// CUDA C++ programming guide, technical specifications by compute capability.
typedef struct {
  const char *name, *pci_bus;
  int major, minor, multiprocessors, shared_per_block, shared_per_multiprocessor, clock_khz, memory_clock_khz, bus_bits;
} Device;

static const Device devices[] = {
    {"Stub of an H100 80GB HBM3", "0000:01:00.0", 9, 0, 132, 227 << 10, 228 << 10, 1980000, 2619000, 5120},
    {"Stub of an A100-SXM4-80GB", "0000:02:00.0", 8, 0, 108, 163 << 10, 164 << 10, 1410000, 1593000, 5120},
};
enum { NUM_DEVICES = sizeof devices / sizeof *devices };

static const size_t TOTAL_BYTES = (size_t)8 << 30, FREE_BYTES = (size_t)6 << 30;

// How many multiprocessors are claimed: GPU_STUB_SMS for a grid that a CPU executes in time.
static inline int multiprocessors(int device) {
  const char *given = getenv("GPU_STUB_SMS");
  return given ? atoi(given) : devices[device].multiprocessors;
}
