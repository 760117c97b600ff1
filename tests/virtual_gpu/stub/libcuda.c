// A stub of libcuda.so.1 for Triton's driver module, its launchers and torch's symmetric memory.
//
// Device memory is host memory; what cuMemCreate gives is a memfd, so that processes share it. A launch goes to the
// function that stub_on_launch named, with the module's image and the kernel's parameters as cuLaunchKernelEx got them.
#define _GNU_SOURCE
#include <cuda.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define HAS_GRAPHS
#include "device.h"
#include "graph.h"
#include "ranges.h"

// ---- Launches, as tests see them ----

typedef struct {
  const char *name, *image;
  unsigned grid[3], block[3], shared_bytes;
  unsigned long long stream;
  // One pointer for each parameter of the kernel, to its bytes.
  void **parameters;
} StubLaunch;

// Returns 0 when the kernel was executed, or noted for a graph that is being captured.
static int (*on_launch)(const StubLaunch *);
void stub_on_launch(int (*callback)(const StubLaunch *)) { on_launch = callback; }

// For libcudart's stub: is memory mapped at this address?
int stub_is_mapped(unsigned long long address) { return ranges_find(address).bytes != 0; }

// Note memory that libcudart's stub has given out (bytes), or takes back (0).
int stub_note_memory(unsigned long long begin, size_t bytes) {
  return bytes ? ranges_add(begin, bytes, 1) : ranges_remove(begin) != 0;
}

// All memory of devices and of the host that kernels may touch: begin and bytes of each piece, and how many there are.
int stub_memory(unsigned long long (*pieces)[2], int most) {
  pthread_mutex_lock(&ranges_lock);
  int n = num_ranges < most ? num_ranges : most;
  for (int i = 0; i < n; i++) pieces[i][0] = ranges[i].begin, pieces[i][1] = ranges[i].bytes;
  pthread_mutex_unlock(&ranges_lock);
  return n;
}

// ---- The device ----

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION_SAID;
  return CUDA_SUCCESS;
}

static const char *text_of(CUresult error) {
  switch ((int)error) {
    case CUDA_SUCCESS: return "no error";
    case CUDA_ERROR_INVALID_VALUE: return "invalid argument";
    case CUDA_ERROR_OUT_OF_MEMORY: return "out of memory";
    case CUDA_ERROR_INVALID_IMAGE: return "device kernel image is invalid";
    case CUDA_ERROR_NOT_FOUND: return "named symbol not found";
    case CUDA_ERROR_NOT_SUPPORTED: return "operation not supported";
    case CUDA_ERROR_LAUNCH_FAILED: return "unspecified launch failure";
    default: return "an error that the stub does not name";
  }
}

CUresult cuGetErrorName(CUresult error, const char **text) {
  *text = text_of(error);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) { return cuGetErrorName(error, text); }

CUresult cuDeviceGetCount(int *count) {
  *count = num_devices();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return (unsigned)ordinal < num_devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
  snprintf(name, size, "%s", device_of(device)->name);
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
  *bytes = TOTAL_BYTES;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  const Device *d = device_of(device);
  switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = d->major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = d->minor; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = multiprocessors(device); break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = WARP; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = REGISTERS; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = SHARED_PER_BLOCK; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = d->shared_per_block; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = d->shared_per_multiprocessor; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = d->clock_khz; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = d->memory_clock_khz; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = d->bus_bits; break;
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: *value = 0; break;
    // Every other attribute is asked as "does it have this?".
    default: *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice from, CUdevice to) {
  *value = 1;
  return CUDA_SUCCESS;
}

// ---- Contexts: one a device, and a thread's current one ----

static __thread int current;
// For libcudart's stub.
int *stub_current_device(void) { return &current; }

static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(device + 1); }

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = context_of(current);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
  *device = current;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  if (context) current = (int)(uintptr_t)context - 1;
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) { return cuCtxSetCurrent(context); }
CUresult cuCtxPopCurrent(CUcontext *context) { return cuCtxGetCurrent(context); }

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = context_of(device);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 0;
  return CUDA_SUCCESS;
}

// ---- Modules: an image is PTX, which a driver takes as it takes a cubin ----

typedef struct {
  char *image, *name;
} Function;

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  // A cubin, which is an ELF file, could not be executed.
  if (!memcmp(image, "\x7f" "ELF", 4)) return CUDA_ERROR_INVALID_IMAGE;
  *module = (CUmodule)strdup(image);
  return *module ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) {
  return cuModuleLoadData(module, image);
}

// Images stay: functions of an unloaded module may still be launched by a test that keeps them.
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  char *entry = strstr((char *)module, ".entry ");
  if (!entry || strncmp(entry + 7, name, strlen(name)) || entry[7 + strlen(name)] != '(') return CUDA_ERROR_NOT_FOUND;
  Function *found = malloc(sizeof *found);
  *found = (Function){(char *)module, strdup(name)};
  *function = (CUfunction)found;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? MAX_THREADS_PER_BLOCK : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  *count = 1;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  const Function *f = (const Function *)function;
  StubLaunch launch = {
      .name = f->name,
      .image = f->image,
      .grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
      .block = {config->blockDimX, config->blockDimY, config->blockDimZ},
      .shared_bytes = config->sharedMemBytes,
      .stream = (unsigned long long)config->hStream,
      .parameters = parameters,
  };
  // Clusters, cooperative grids and programmatic launches come as attributes; no kernel here has any.
  if (config->numAttrs || extra) return CUDA_ERROR_NOT_SUPPORTED;
  return on_launch && on_launch(&launch) ? CUDA_ERROR_LAUNCH_FAILED : CUDA_SUCCESS;
}

// ---- Tensor maps ----

static unsigned element_bytes(CUtensorMapDataType type) {
  switch ((int)type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return 8;
    default: return 4;
  }
}

static unsigned widest_box(CUtensorMapSwizzle swizzle) {
  switch ((int)swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_NONE: return ~0u;
    case CU_TENSOR_MAP_SWIZZLE_32B: return 32;
    case CU_TENSOR_MAP_SWIZZLE_64B: return 64;
    default: return 128;
  }
}

// The contents of a map, in place of NVIDIA's own coding. Bit 21 of the second word must mean nothing: Triton 3.7 and
// later clear it for tensors below 128 KiB on drivers up to 13.1.
typedef struct {
  uint64_t address;
  uint32_t rank, magic, swizzle, element_bytes;
  uint32_t dims[5], box[5];
  uint64_t strides[4];
} StubMap;
_Static_assert(sizeof(StubMap) <= sizeof(CUtensorMap), "a tensor map has 128 bytes");
enum { MAP_MAGIC = 0x70616d73 };

// Refuses what the driver API's reference says that cuTensorMapEncodeTiled refuses.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  if ((uintptr_t)map % 64 || (uintptr_t)address % 16 || !rank || rank > 5) return CUDA_ERROR_INVALID_VALUE;
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill) return CUDA_ERROR_NOT_SUPPORTED;
  StubMap made = {(uintptr_t)address, rank, MAP_MAGIC, swizzle, element_bytes(type)};
  for (unsigned i = 0; i < rank; i++) {
    if (!dims[i] || dims[i] >> 32 || !box[i] || box[i] > 256) return CUDA_ERROR_INVALID_VALUE;
    if (element_strides[i] != 1) return CUDA_ERROR_NOT_SUPPORTED;
    made.dims[i] = dims[i];
    made.box[i] = box[i];
  }
  for (unsigned i = 0; i + 1 < rank; i++) {
    if (strides[i] % 16 || strides[i] >> 40) return CUDA_ERROR_INVALID_VALUE;
    made.strides[i] = strides[i];
  }
  unsigned inner = box[0] * element_bytes(type);
  if (inner % 16 || inner > widest_box(swizzle)) return CUDA_ERROR_INVALID_VALUE;
  memset(map, 0, sizeof *map);
  memcpy(map, &made, sizeof made);
  return CUDA_SUCCESS;
}

// ---- Memory ----

enum { GRANULARITY = 2 << 20 };

// A handle is a file descriptor plus one, so that none is 0.
static int fd_of(CUmemGenericAllocationHandle handle) { return (int)handle - 1; }

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *prop,
                                       CUmemAllocationGranularity_flags flags) {
  *bytes = GRANULARITY;
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                     unsigned long long flags) {
  int fd = memfd_create("gpu-stub", 0);
  if (fd < 0 || ftruncate(fd, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = fd + 1;
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  close(fd_of(handle));
  return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long flags) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  *(int *)out = dup(fd_of(handle));
  return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *from,
                                        CUmemAllocationHandleType type) {
  int fd = dup((int)(intptr_t)from);
  if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
  *handle = fd + 1;
  return CUDA_SUCCESS;
}

// torch asks these of memory from elsewhere only.
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
  return CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle) {
  return CUDA_ERROR_INVALID_VALUE;
}

static const int RESERVED = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wish,
                             unsigned long long flags) {
  void *room = mmap(0, bytes + GRANULARITY, PROT_NONE, RESERVED, -1, 0);
  if (room == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = ((uintptr_t)room + GRANULARITY - 1) & ~(uintptr_t)(GRANULARITY - 1);
  return CUDA_SUCCESS;
}

// Addresses are never given back: there are enough of them.
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) { return CUDA_SUCCESS; }

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  void *at = mmap((void *)address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_of(handle), offset);
  if (at == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
  return ranges_add(address, bytes, 0) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count) {
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  ranges_remove(address);
  void *at = mmap((void *)address, bytes, PROT_NONE, RESERVED | MAP_FIXED, -1, 0);
  return at == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr *begin, size_t *bytes, CUdeviceptr address) {
  Range found = ranges_find(address);
  if (begin) *begin = found.begin;
  if (bytes) *bytes = found.bytes;
  return found.bytes ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// Every address of the host is one of the device.
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr address) {
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUDA_ERROR_NOT_SUPPORTED;
  *(CUdeviceptr *)out = address;
  return CUDA_SUCCESS;
}

// ---- Streams and graphs: see graph.h ----

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = capture_of(stream) ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
  return stub_synchronize(stream) ? CUDA_ERROR_LAUNCH_FAILED : CUDA_SUCCESS;
}

CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream stream) {
  if (capture_of(stream)) return CUDA_ERROR_NOT_SUPPORTED;
  if (stub_synchronize(stream)) return CUDA_ERROR_LAUNCH_FAILED;
  for (size_t i = 0; i < count; i++) ((unsigned *)address)[i] = value;
  return CUDA_SUCCESS;
}

CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  stub_put((Node){WRITE_32, (void *)address, .value = value}, stream);
  return CUDA_SUCCESS;
}

CUresult cuStreamBatchMemOp(CUstream stream, unsigned count, CUstreamBatchMemOpParams *ops, unsigned flags) {
  if (!count || count > 255 || flags) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < count; i++) {
    if (ops[i].operation != CU_STREAM_MEM_OP_WRITE_VALUE_32) return CUDA_ERROR_NOT_SUPPORTED;
    cuStreamWriteValue32(stream, ops[i].writeValue.address, ops[i].writeValue.value, ops[i].writeValue.flags);
  }
  return CUDA_SUCCESS;
}

// Work on a stream is done at once: its thread waits here, as for the stream's later work.
CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  struct timespec pause = {0, 50000};
  if (capture_of(stream) || flags != CU_STREAM_WAIT_VALUE_GEQ) return CUDA_ERROR_NOT_SUPPORTED;
  if (stub_synchronize(stream)) return CUDA_ERROR_LAUNCH_FAILED;
  while ((int)(__atomic_load_n((unsigned *)address, __ATOMIC_ACQUIRE) - value) < 0) nanosleep(&pause, NULL);
  return CUDA_SUCCESS;
}

// A node's handle is its index, from 1.
CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *number, CUgraph *graph,
                                   const CUgraphNode **nodes, size_t *count) {
  static __thread CUgraphNode found[4096];
  Place *p = place(&streams, stream);
  cuStreamIsCapturing(stream, status);
  if (!p->graph) return CUDA_SUCCESS;
  if (p->nodes.count > 4096) return CUDA_ERROR_NOT_SUPPORTED;
  for (int i = 0; i < p->nodes.count; i++) found[i] = (CUgraphNode)(uintptr_t)(p->nodes.of[i] + 1);
  if (number) *number = p->graph->number;
  if (graph) *graph = (CUgraph)p->graph;
  if (nodes) *nodes = found;
  if (count) *count = p->nodes.count;
  return CUDA_SUCCESS;
}

// Puts nodes into a set, or returns an error: a handle of no node, or a node twice.
static CUresult put_handles(Set *set, const Graph *graph, const CUgraphNode *nodes, size_t count) {
  for (size_t i = 0; i < count; i++) {
    int node = (int)(uintptr_t)nodes[i] - 1;
    if (node < 0 || node >= graph->num_nodes || has(set, node)) return CUDA_ERROR_INVALID_VALUE;
    put_in(set, node);
  }
  return CUDA_SUCCESS;
}

static CUresult add_event(Kind kind, CUgraphNode *made, CUgraph graph, const CUgraphNode *nodes, size_t count,
                          CUevent event) {
  Set follows = {0};
  if (!event || put_handles(&follows, (Graph *)graph, nodes, count)) return CUDA_ERROR_INVALID_VALUE;
  int node = add_node((Graph *)graph, (Node){kind, event}, &follows);
  ((Graph *)graph)->direct[node] = 1;
  *made = (CUgraphNode)(uintptr_t)(node + 1);
  return CUDA_SUCCESS;
}

CUresult cuGraphAddEventWaitNode(CUgraphNode *made, CUgraph graph, const CUgraphNode *nodes, size_t count,
                                 CUevent event) {
  return add_event(WAIT, made, graph, nodes, count, event);
}

CUresult cuGraphAddEventRecordNode(CUgraphNode *made, CUgraph graph, const CUgraphNode *nodes, size_t count,
                                   CUevent event) {
  return add_event(RECORD, made, graph, nodes, count, event);
}

#undef cuGraphAddDependencies
CUresult cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count) {
  for (size_t i = 0; i < count; i++) {
    Set *follows = ((Graph *)graph)->follows + (int)(uintptr_t)to[i] - 1;
    if (put_handles(follows, (Graph *)graph, from + i, 1)) return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

#undef cuStreamUpdateCaptureDependencies
CUresult cuStreamUpdateCaptureDependencies(CUstream stream, CUgraphNode *nodes, size_t count, unsigned flags) {
  Place *p = place(&streams, stream);
  if (!p->graph) return CUDA_ERROR_ILLEGAL_STATE;
  if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES) p->nodes.count = 0;
  return put_handles(&p->nodes, p->graph, nodes, count);
}
