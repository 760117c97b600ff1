// A stub of libnccl.so.2 for torch's ProcessGroupNCCL: the collectives between processes of one host, through shared
// memory, on the host. Sums are made in float64, in rank order, and rounded once.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, HALF, FLOAT, DOUBLE, BFLOAT16 };
enum { SUM, PROD, MAX, MIN, AVG };
enum { VERSION = 22800, MOST_RANKS = 16, SLOT_BYTES = 1 << 20 };

typedef struct {
  char bytes[128];
} UniqueId;

// The memory of a communicator: a barrier and a slot for each rank.
typedef struct {
  int arrived, phase, aborted;
  char slots[MOST_RANKS][SLOT_BYTES];
} Shared;

typedef struct {
  Shared *shared;
  int rank, size;
} Comm;

static int wait_for_all(Comm *c) {
  Shared *s = c->shared;
  int phase = __atomic_load_n(&s->phase, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&s->arrived, 1, __ATOMIC_ACQ_REL) == c->size) {
    __atomic_store_n(&s->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&s->phase, phase + 1, __ATOMIC_RELEASE);
  }
  const struct timespec pause = {0, 50000};
  while (__atomic_load_n(&s->phase, __ATOMIC_ACQUIRE) == phase) {
    if (__atomic_load_n(&s->aborted, __ATOMIC_ACQUIRE)) return SYSTEM_ERROR;
    nanosleep(&pause, NULL);
  }
  return SUCCESS;
}

int ncclGetVersion(int *version) {
  *version = VERSION;
  return SUCCESS;
}

int ncclGetUniqueId(UniqueId *id) {
  static int count;
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof id->bytes, "/gpu-stub-nccl-%d-%d", getpid(), __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED));
  return SUCCESS;
}

int ncclCommInitRankConfig(Comm **comm, int size, UniqueId id, int rank, void *config) {
  if (size > MOST_RANKS) return INVALID_ARGUMENT;
  int fd = shm_open(id.bytes, O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(Shared))) return SYSTEM_ERROR;
  Comm *made = malloc(sizeof *made);
  *made = (Comm){mmap(0, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), rank, size};
  close(fd);
  if (made->shared == MAP_FAILED || wait_for_all(made)) return SYSTEM_ERROR;
  if (!rank) shm_unlink(id.bytes);
  *comm = made;
  return SUCCESS;
}

int ncclCommInitRank(Comm **comm, int size, UniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, size, id, rank, NULL);
}

int ncclCommInitRankScalable(Comm **comm, int size, int rank, int num_ids, UniqueId *ids, void *config) {
  return ncclCommInitRankConfig(comm, size, ids[0], rank, config);
}

int ncclCommAbort(Comm *c) {
  __atomic_store_n(&c->shared->aborted, 1, __ATOMIC_RELEASE);
  return SUCCESS;
}

int ncclCommFinalize(Comm *c) { return SUCCESS; }
int ncclCommDestroy(Comm *c) { return SUCCESS; }

int ncclCommGetAsyncError(Comm *c, int *error) {
  *error = SUCCESS;
  return SUCCESS;
}

int ncclCommCount(const Comm *c, int *count) {
  *count = c->size;
  return SUCCESS;
}

int ncclCommUserRank(const Comm *c, int *rank) {
  *rank = c->rank;
  return SUCCESS;
}

int ncclCommRegister(Comm *c, void *buffer, size_t bytes, void **handle) {
  *handle = buffer;
  return SUCCESS;
}

int ncclCommDeregister(Comm *c, void *handle) { return SUCCESS; }
int ncclGroupStart(void) { return SUCCESS; }
int ncclGroupEnd(void) { return SUCCESS; }
const char *ncclGetErrorString(int error) { return error ? "an error of the stub of NCCL" : "no error"; }
const char *ncclGetLastError(Comm *c) { return ""; }

static size_t bytes_of(int type) { return (size_t[]){1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}[type]; }

static double get(const void *from, int type, size_t i) {
  switch (type) {
    case INT8: return ((const int8_t *)from)[i];
    case UINT8: return ((const uint8_t *)from)[i];
    case INT32: return ((const int32_t *)from)[i];
    case UINT32: return ((const uint32_t *)from)[i];
    case INT64: return ((const int64_t *)from)[i];
    case UINT64: return ((const uint64_t *)from)[i];
    case HALF: return ((const _Float16 *)from)[i];
    case FLOAT: return ((const float *)from)[i];
    case DOUBLE: return ((const double *)from)[i];
    default: {
      uint32_t bits = (uint32_t)((const uint16_t *)from)[i] << 16;
      float value;
      memcpy(&value, &bits, 4);
      return value;
    }
  }
}

static void put(void *to, int type, size_t i, double value) {
  switch (type) {
    case INT8: ((int8_t *)to)[i] = value; break;
    case UINT8: ((uint8_t *)to)[i] = value; break;
    case INT32: ((int32_t *)to)[i] = value; break;
    case UINT32: ((uint32_t *)to)[i] = value; break;
    case INT64: ((int64_t *)to)[i] = value; break;
    case UINT64: ((uint64_t *)to)[i] = value; break;
    case HALF: ((_Float16 *)to)[i] = value; break;
    case FLOAT: ((float *)to)[i] = value; break;
    case DOUBLE: ((double *)to)[i] = value; break;
    default: {
      float f = value;
      uint32_t bits;
      memcpy(&bits, &f, 4);
      ((uint16_t *)to)[i] = f != f ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
  }
}

static double joined(double x, double y, int op) {
  switch (op) {
    case PROD: return x * y;
    case MAX: return x > y ? x : y;
    case MIN: return x < y ? x : y;
    default: return x + y;
  }
}

// Gives every rank's bytes begin .. begin + length of `from` to `use`, a slot at a time.
typedef void Use(Comm *, size_t begin, size_t length, void *context);
static int exchanged(Comm *c, const char *from, size_t bytes, Use *use, void *context) {
  for (size_t begin = 0; begin < bytes; begin += SLOT_BYTES) {
    size_t length = bytes - begin < SLOT_BYTES ? bytes - begin : SLOT_BYTES;
    if (from) memcpy(c->shared->slots[c->rank], from + begin, length);
    if (wait_for_all(c)) return SYSTEM_ERROR;
    use(c, begin, length, context);
    if (wait_for_all(c)) return SYSTEM_ERROR;
  }
  return SUCCESS;
}

typedef struct {
  char *to;
  size_t bytes;
  int type, op, root;
} Target;

static void gather(Comm *c, size_t begin, size_t length, void *context) {
  Target *t = context;
  for (int r = 0; r < c->size; r++) memcpy(t->to + r * t->bytes + begin, c->shared->slots[r], length);
}

static void of_root(Comm *c, size_t begin, size_t length, void *context) {
  Target *t = context;
  memcpy(t->to + begin, c->shared->slots[t->root], length);
}

// The elements begin .. begin + length that lie in a target of `bytes`, which begins at root * bytes.
static void reduce(Comm *c, size_t begin, size_t length, void *context) {
  Target *t = context;
  size_t size = bytes_of(t->type), first = t->root * t->bytes;
  for (size_t at = begin; at < begin + length; at += size) {
    if (at < first || at >= first + t->bytes) continue;
    double sum = get(c->shared->slots[0] + at - begin, t->type, 0);
    for (int r = 1; r < c->size; r++) sum = joined(sum, get(c->shared->slots[r] + at - begin, t->type, 0), t->op);
    put(t->to + at - first, t->type, 0, t->op == AVG ? sum / c->size : sum);
  }
}

// Whether a stream is captured: a collective would run once, and be missing from every replay. It is refused.
static int captured(void *stream) {
  static int (*asked)(void *, int *);
  if (!asked) asked = dlsym(RTLD_DEFAULT, "cudaStreamIsCapturing");
  int status = 0;
  return asked && !asked(stream, &status) && status;
}

int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *c, void *stream) {
  if (captured(stream)) return INVALID_USAGE;
  Target t = {to, count * bytes_of(type)};
  return exchanged(c, from, t.bytes, gather, &t);
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *c, void *stream) {
  if (captured(stream)) return INVALID_USAGE;
  Target t = {to, count * bytes_of(type), .root = root};
  return exchanged(c, c->rank == root ? from : NULL, t.bytes, of_root, &t);
}

int ncclBcast(void *buffer, size_t count, int type, int root, Comm *c, void *stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, c, stream);
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, Comm *c, void *stream) {
  if (captured(stream)) return INVALID_USAGE;
  Target t = {to, count * bytes_of(type), type, op, 0};
  return exchanged(c, from, t.bytes, reduce, &t);
}

int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, Comm *c, void *stream) {
  char *scratch = c->rank == root ? to : malloc(count * bytes_of(type) + 1);
  int code = ncclAllReduce(from, scratch, count, type, op, c, stream);
  if (scratch != to) free(scratch);
  return code;
}

int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, Comm *c, void *stream) {
  if (captured(stream)) return INVALID_USAGE;
  size_t bytes = count * bytes_of(type);
  Target t = {to, bytes, type, op, c->rank};
  return exchanged(c, from, c->size * bytes, reduce, &t);
}
