// A stand-in for libcuda.so.1 on a machine without a GPU. It answers the driver calls that the launcher makes and
// passes launches to the emulated kernels. The real cuda-bindings thus run between launcher and kernels, as on a
// machine with a GPU.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <string>
#include <thread>

namespace {
enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_FOUND = 500 };

struct Function { std::string name; int dynamic_shared; };

void* emulated() {
  static void* handle = dlopen(std::getenv("CIUIC_TEST_EMULATED"), RTLD_NOW);
  return handle;
}

// torch has made a context for the main thread; others have none until it is set.
const std::thread::id main_thread = std::this_thread::get_id();
void* const context = (void*)0xC0;
thread_local void* current = std::this_thread::get_id() == main_thread ? context : nullptr;

int init(unsigned) { return SUCCESS; }
int driver_version(int* version) { *version = 13000; return SUCCESS; }
int ctx_device(int* device) { *device = 0; return SUCCESS; }
int get_current(void** found) { *found = current; return SUCCESS; }
int set_current(void* wanted) { current = wanted; return SUCCESS; }
int device_attribute(int* value, int attribute, int) {
  if (attribute == 97) *value = 232448;   // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
  else if (attribute == 16) *value = 132;  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
  else return INVALID_VALUE;
  return SUCCESS;
}
int load_data(void** module, const void* image) {
  if (current != context) return 201;  // CUDA_ERROR_INVALID_CONTEXT
  if (std::memcmp(image, "\177ELF", 4)) return 200;  // CUDA_ERROR_INVALID_IMAGE
  *module = const_cast<void*>(image);
  return SUCCESS;
}
int get_function(void** function, void*, const char* name) {
  *function = new Function{name, 0};
  return SUCCESS;
}
int function_attribute(int* value, int attribute, void*) {
  if (attribute != 1) return INVALID_VALUE;  // CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
  *value = 2048;
  return SUCCESS;
}
int set_function_attribute(void* function, int attribute, int value) {
  if (attribute != 8 || value > 232448 - 2048) return INVALID_VALUE;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
  static_cast<Function*>(function)->dynamic_shared = value;
  return SUCCESS;
}
int launch(void* handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
           void* stream, void** parameters, void** extra) {
  const Function& function = *static_cast<Function*>(handle);
  if (gz != 1 || by != 1 || bz != 1 || extra || stream != (void*)0x5717 || (int)shared > function.dynamic_shared)
    return INVALID_VALUE;
  auto size = (size_t(*)(const char*))dlsym(emulated(), "emu_parameter_bytes");
  auto run = (int (*)(const char*, unsigned, unsigned, unsigned, unsigned, const void*, size_t, unsigned))dlsym(
      emulated(), "emu_launch");
  const char* name = function.name.c_str();
  return run(name, gx, gy, bx, shared, parameters[0], size(name), 1) ? 700 : SUCCESS;  // illegal address
}
struct Config { unsigned gx, gy, gz, bx, by, bz, shared; void* stream; int* attribute; unsigned attributes; };
int launch_early(const Config* c, void* handle, void** parameters, void** extra) {
  const int PROGRAMMATIC_STREAM_SERIALIZATION = 6;  // CUlaunchAttribute: its id, then its value from byte 8 on
  if (c->attributes != 1 || c->attribute[0] != PROGRAMMATIC_STREAM_SERIALIZATION || c->attribute[2] != 1) return INVALID_VALUE;
  return launch(handle, c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->shared, c->stream, parameters, extra);
}
int error_name(int error, const char** name) {
  *name = error == 200 ? "CUDA_ERROR_INVALID_IMAGE" : error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER";
  return SUCCESS;
}

const struct { const char* name; void* function; } table[] = {
    {"cuInit", (void*)init},
    {"cuDriverGetVersion", (void*)driver_version},
    {"cuCtxGetDevice", (void*)ctx_device},
    {"cuCtxGetCurrent", (void*)get_current},
    {"cuCtxSetCurrent", (void*)set_current},
    {"cuDeviceGetAttribute", (void*)device_attribute},
    {"cuModuleLoadData", (void*)load_data},
    {"cuModuleGetFunction", (void*)get_function},
    {"cuFuncGetAttribute", (void*)function_attribute},
    {"cuFuncSetAttribute", (void*)set_function_attribute},
    {"cuLaunchKernel", (void*)launch},
    {"cuLaunchKernelEx", (void*)launch_early},
    {"cuGetErrorName", (void*)error_name},
};
}  // namespace

extern "C" {
__attribute__((visibility("default"))) int cuGetProcAddress_v2(const char* symbol, void** pointer, int, unsigned long long,
                                                               int* status) {
  *pointer = nullptr;
  for (const auto& entry : table)
    if (!std::strcmp(symbol, entry.name)) *pointer = entry.function;
  if (!std::strcmp(symbol, "cuGetProcAddress")) *pointer = (void*)cuGetProcAddress_v2;
  if (status) *status = *pointer ? 0 : 1;
  return *pointer ? SUCCESS : NOT_FOUND;
}
__attribute__((visibility("default"))) int cuGetProcAddress(const char* symbol, void** pointer, int version,
                                                            unsigned long long flags) {
  return cuGetProcAddress_v2(symbol, pointer, version, flags, nullptr);
}
}
