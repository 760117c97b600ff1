// The devices that the stub claims to have: 0 is an H100 SXM, 1 an A100; with GPU_STUB_DEVICES=N N H100s. Their memory is
// the host's.
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
  const char *name;
  int major, minor, multiprocessors, shared_per_block, shared_per_multiprocessor, clock_khz, memory_clock_khz, bus_bits;
} Device;

static const Device kinds[] = {
    {"Stub of an H100 80GB HBM3", 9, 0, 132, 227 << 10, 228 << 10, 1980000, 2619000, 5120},
    {"Stub of an A100-SXM4-80GB", 8, 0, 108, 163 << 10, 164 << 10, 1410000, 1593000, 5120},
};

static const size_t TOTAL_BYTES = (size_t)8 << 30, FREE_BYTES = (size_t)6 << 30;

static inline int number_in(const char *variable, int otherwise) {
  const char *given = getenv(variable);
  return given ? atoi(given) : otherwise;
}

static inline int num_devices(void) { return number_in("GPU_STUB_DEVICES", sizeof kinds / sizeof *kinds); }
static inline const Device *device_of(int ordinal) { return kinds + (getenv("GPU_STUB_DEVICES") ? 0 : ordinal); }
// Fewer multiprocessors make a grid that a CPU executes in time.
static inline int multiprocessors(int ordinal) { return number_in("GPU_STUB_SMS", device_of(ordinal)->multiprocessors); }
static inline void pci_bus(char *id, int size, int ordinal) { snprintf(id, size, "0000:%02x:00.0", ordinal + 1); }
