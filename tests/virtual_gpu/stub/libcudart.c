// A stub of libcudart.so.13 for torch: device memory is host memory, streams and graphs are libcuda's stub's (graph.h), and
// torch's own kernels are an error: torch's CPU kernels take their place (torch_kernels.py).
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "device.h"
#include "graph.h"
#include "ranges.h"

static void *driver_symbol(const char *name) {
  static void *library;
  if (!library) library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  return library ? dlsym(library, name) : NULL;
}

// torch takes every function of libcuda from here; some are exported with a version behind their name only.
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  char versioned[256];
  snprintf(versioned, sizeof versioned, "%s_v2", name);
  *function = driver_symbol(name);
  if (!*function) *function = driver_symbol(versioned);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// ---- Errors: the last one of a thread ----

static __thread cudaError_t last;

static cudaError_t failed(cudaError_t error) { return last = error; }

cudaError_t cudaGetLastError(void) {
  cudaError_t error = last;
  last = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorName(cudaError_t error) { return error ? "an error of the stub" : "cudaSuccess"; }

const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotSupported: return "the stub of a GPU does not support this";
    case cudaErrorInvalidDeviceFunction: return "the stub of a GPU runs no kernel of torch's";
    default: return "an error of the stub";
  }
}

// ---- The device ----

static int *current(void) {
  static int *(*of)(void);
  if (!of) of = driver_symbol("stub_current_device");
  return of();
}

cudaError_t cudaGetDeviceCount(int *count) {
  *count = num_devices();
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
  *device = *current();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if ((unsigned)device >= num_devices()) return failed(cudaErrorInvalidDevice);
  *current() = device;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDA_VERSION_SAID;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int ordinal) {
  const Device *d = device_of(ordinal);
  memset(prop, 0, sizeof *prop);
  strcpy(prop->name, d->name);
  memset(prop->uuid.bytes, 7 + ordinal, sizeof prop->uuid.bytes);
  prop->pciBusID = ordinal + 1;
  prop->totalGlobalMem = TOTAL_BYTES;
  prop->major = d->major;
  prop->minor = d->minor;
  prop->multiProcessorCount = multiprocessors(ordinal);
  prop->warpSize = WARP;
  prop->l2CacheSize = L2_BYTES;
  prop->regsPerBlock = prop->regsPerMultiprocessor = REGISTERS;
  prop->sharedMemPerBlock = SHARED_PER_BLOCK;
  prop->sharedMemPerBlockOptin = d->shared_per_block;
  prop->sharedMemPerMultiprocessor = d->shared_per_multiprocessor;
  prop->maxThreadsPerBlock = MAX_THREADS_PER_BLOCK;
  prop->maxThreadsPerMultiProcessor = MAX_THREADS_PER_SM;
  prop->maxGridSize[0] = 2147483647;
  prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
  prop->unifiedAddressing = prop->canMapHostMemory = prop->computePreemptionSupported = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int ordinal) {
  const Device *d = device_of(ordinal);
  switch ((int)attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = d->major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = d->minor; break;
    case cudaDevAttrMultiProcessorCount: *value = multiprocessors(ordinal); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = d->shared_per_block; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int ordinal) {
  pci_bus(id, size, ordinal);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaSuccess; }

// Calls a function of libcuda's stub that returns whether it failed.
#define CALL(error, name, types, ...) \
  (((int (*) types)driver_symbol(#name))(__VA_ARGS__) ? failed(error) : cudaSuccess)

cudaError_t cudaDeviceSynchronize(void) { return CALL(cudaErrorLaunchFailure, stub_synchronize_all, (void)); }

// ---- Memory ----

static int note(void *address, size_t bytes) {
  int (*of)(unsigned long long, size_t) = driver_symbol("stub_note_memory");
  return of((uintptr_t)address, bytes);
}

static cudaError_t take(void **address, size_t bytes, int kind) {
  *address = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*address == MAP_FAILED || !ranges_add((uintptr_t)*address, bytes, kind) || !note(*address, bytes))
    return failed(cudaErrorMemoryAllocation);
  return cudaSuccess;
}

static cudaError_t give_back(void *address) {
  size_t bytes = ranges_remove((uintptr_t)address);
  if (bytes) {
    note(address, 0);
    munmap(address, bytes);
  }
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
  *left = FREE_BYTES;
  *total = TOTAL_BYTES;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **address, size_t bytes) { return take(address, bytes, cudaMemoryTypeDevice); }

// Waits for the device.
cudaError_t cudaFree(void *address) {
  cudaError_t error = cudaDeviceSynchronize();
  give_back(address);
  return error;
}

cudaError_t cudaMallocAsync(void **address, size_t bytes, cudaStream_t stream) { return cudaMalloc(address, bytes); }
cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { return give_back(address); }

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
  *pool = (cudaMemPool_t)1;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
  return take(address, bytes, cudaMemoryTypeHost);
}

cudaError_t cudaFreeHost(void *address) { return give_back(address); }

cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
  if (!ranges_add((uintptr_t)address, bytes, cudaMemoryTypeHost)) return failed(cudaErrorMemoryAllocation);
  note(address, bytes);
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *address) {
  ranges_remove((uintptr_t)address);
  note(address, 0);
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
  Range range = ranges_find((uintptr_t)address);
  int (*is_mapped)(unsigned long long) = driver_symbol("stub_is_mapped");
  memset(attributes, 0, sizeof *attributes);
  attributes->device = *current();
  attributes->type = range.bytes ? range.kind : cudaMemoryTypeUnregistered;
  // What libcuda's stub has mapped, which peers share, is the device's too.
  if (!range.bytes && is_mapped((uintptr_t)address)) attributes->type = cudaMemoryTypeDevice;
  attributes->hostPointer = (void *)address;
  if (attributes->type != cudaMemoryTypeUnregistered) attributes->devicePointer = (void *)address;
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) { return cudaMalloc(address, 4096); }

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  cudaError_t error = cudaDeviceSynchronize();
  memmove(to, from, bytes);
  return error;
}

static cudaError_t put(Node node, cudaStream_t stream) {
  return CALL(cudaErrorLaunchFailure, stub_put, (Node, void *), node, stream);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return put((Node){COPY, to, from, bytes}, stream);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int peer, size_t bytes, cudaStream_t stream) {
  return put((Node){COPY, to, from, bytes}, stream);
}

cudaError_t cudaMemset(void *address, int value, size_t bytes) {
  cudaError_t error = cudaDeviceSynchronize();
  memset(address, value, bytes);
  return error;
}

cudaError_t cudaMemsetAsync(void *address, int value, size_t bytes, cudaStream_t stream) {
  return put((Node){FILL, address, .bytes = bytes, .value = value}, stream);
}

// ---- Streams, and events with the host's time ----

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
  static uintptr_t next = 100;
  *stream = (cudaStream_t)(16 * __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED));
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  return cudaStreamCreate(stream);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return CALL(cudaErrorLaunchFailure, stub_synchronize, (void *), stream);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  if (flags) return failed(cudaErrorNotSupported);
  return CALL(cudaErrorStreamCaptureIsolation, stub_wait, (void *, void *), stream, event);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = 0;
  return cudaSuccess;
}

static unsigned long long capture_of(cudaStream_t stream) {
  return ((unsigned long long (*)(void *))driver_symbol("stub_capture"))(stream);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = capture_of(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  cudaStreamIsCapturing(stream, status);
  if (id) *id = capture_of(stream);
  if (graph) *graph = NULL;
  if (count) *count = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  return CALL(cudaErrorIllegalState, stub_begin_capture, (void *), stream);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  *graph = ((cudaGraph_t (*)(void *))driver_symbol("stub_end_capture"))(stream);
  return *graph ? cudaSuccess : failed(cudaErrorStreamCaptureUnjoined);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  *count = ((Graph *)graph)->num_nodes;
  return cudaSuccess;
}

// Graphs stay for as long as the process lives: an executable one is the graph itself.
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
  *made = (cudaGraphExec_t)graph;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return cudaSuccess; }

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  return CALL(cudaErrorLaunchFailure, stub_launch, (void *, void *), graph, stream);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }

typedef struct {
  double ms;
  int is_timed;
} Event;

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) {
  Event *event = calloc(1, sizeof *event);
  event->is_timed = !(flags & cudaEventDisableTiming);
  *made = (cudaEvent_t)event;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  ((void (*)(void *))driver_symbol("stub_forget"))(event);
  free(event);
  return cudaSuccess;
}

// A time is read when all before it is done, so nothing is late for an event with one.
// The device's own time: what a kernel takes is added to it, and a spin. Work is done when it is launched, but counts as
// done when the device, which may be behind a spin, would have done it: so a timed event does not see the host.
static double ready_ms;

static double now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

void stub_work(double begin_ms, double length_ms) { ready_ms = (ready_ms > begin_ms ? ready_ms : begin_ms) + length_ms; }

void stub_spin(double length_ms) { stub_work(now_ms(), length_ms); }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  cudaError_t error = ((Event *)event)->is_timed && !capture_of(stream) ? cudaStreamSynchronize(stream) : cudaSuccess;
  double now = now_ms();
  ((Event *)event)->ms = ready_ms > now ? ready_ms : now;
  // No two events are at the same time.
  ready_ms = ((Event *)event)->ms + 1e-3;
  ((int (*)(void *, void *))driver_symbol("stub_record"))(event, stream);
  return error;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return flags ? failed(cudaErrorNotSupported) : cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) { return CALL(cudaErrorNotReady, stub_is_pending, (void *), event); }

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  cudaError_t error = CALL(cudaErrorLaunchFailure, stub_reach, (void *), event);
  // The device may be behind a spin.
  double ahead_ms = ((Event *)event)->is_timed ? ((Event *)event)->ms - now_ms() : 0;
  if (!error && ahead_ms > 0) {
    const struct timespec rest = {(time_t)(ahead_ms / 1e3), (long)(ahead_ms * 1e6) % 1000000000};
    nanosleep(&rest, NULL);
  }
  return error;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) {
  *ms = ((Event *)end)->ms - ((Event *)begin)->ms;
  return cudaSuccess;
}

// ---- Kernels that nvcc compiled into torch: registered, and refused when they are launched ----

void **__cudaRegisterFatBinary(void *binary) {
  static void *handle[4];
  return handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, uint3 *thread,
                            uint3 *block, dim3 *block_dim, dim3 *grid_dim, int *warp_size) {}
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t bytes,
                       int constant, int global) {}

static __thread struct {
  dim3 grid, block;
  size_t shared_bytes;
  void *stream;
} pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, struct CUstream_st *stream) {
  pushed.grid = grid;
  pushed.block = block;
  pushed.shared_bytes = shared_bytes;
  pushed.stream = stream;
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared_bytes = pushed.shared_bytes;
  *(void **)stream = pushed.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
  *kernel = (cudaKernel_t)host;
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **parameters, size_t shared_bytes,
                               cudaStream_t stream) {
  return failed(cudaErrorInvalidDeviceFunction);
}

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **parameters, size_t shared_bytes,
                             cudaStream_t stream) {
  return failed(cudaErrorInvalidDeviceFunction);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **parameters) {
  return failed(cudaErrorInvalidDeviceFunction);
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value) { return cudaSuccess; }

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = MAX_THREADS_PER_BLOCK;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *kernel, int block,
                                                                   size_t shared_bytes, unsigned flags) {
  *count = 1;
  return cudaSuccess;
}
