// Functions of libcuda.so.1 that are looked up by name and not supported. Here without cuda.h, which declares them
// differently from version to version.
#define NOT_SUPPORTED(name) \
  int name() { return 801; /* CUDA_ERROR_NOT_SUPPORTED */ }
NOT_SUPPORTED(cuTensorMapEncodeIm2col)
NOT_SUPPORTED(cuMulticastCreate)
NOT_SUPPORTED(cuMulticastAddDevice)
NOT_SUPPORTED(cuMulticastBindMem)
NOT_SUPPORTED(cuMulticastUnbind)
NOT_SUPPORTED(cuDeviceGetDevResource)
NOT_SUPPORTED(cuDevSmResourceSplitByCount)
NOT_SUPPORTED(cuDevResourceGenerateDesc)
NOT_SUPPORTED(cuGreenCtxCreate)
NOT_SUPPORTED(cuGreenCtxDestroy)
NOT_SUPPORTED(cuGreenCtxStreamCreate)
NOT_SUPPORTED(cuCtxFromGreenCtx)
NOT_SUPPORTED(cuLogsRegisterCallback)
NOT_SUPPORTED(cuLogsUnregisterCallback)
