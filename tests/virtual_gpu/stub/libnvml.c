// A stub of libnvidia-ml.so.1: what torch asks before it makes symmetric memory.
enum { SUCCESS = 0, NOT_SUPPORTED = 3 };

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
  *device = (void *)1;
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { return nvmlDeviceGetHandleByPciBusId_v2("", device); }

// Writes nothing, so that the state of the fabric stays "none". torch 2.11 allocates nothing after an error here.
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return SUCCESS; }
int nvmlDeviceGetGpuFabricInfo(void *device, void *info) { return SUCCESS; }

int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, void *type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return NOT_SUPPORTED; }

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
  *count = 0;
  return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = 13000;
  return SUCCESS;
}
