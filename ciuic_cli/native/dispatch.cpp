// Chooses the kernels for the machine that the library runs on.
#include <cstdlib>
#include <cstring>

#include "ciuic_native.h"
#include "kernels.h"
#include "latent_attention.h"

namespace ciuic {
namespace {

const Kernels* choose() {
  const Kernels* available[4];
  int count = 0;
#ifdef CIUIC_X86_KERNELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("bmi2")) {
#ifdef CIUIC_AMX_KERNELS
    if (const Kernels* table = amx::table_if_usable()) available[count++] = table;
#endif
    available[count++] = &avx512vnni::table;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) available[count++] = &avx2::table;
#endif
  available[count++] = &portable::table;
  const char* wanted = std::getenv("CIUIC_CPU_KERNELS");
  if (wanted != nullptr)
    for (int i = 0; i < count; ++i)
      if (std::strcmp(available[i]->name, wanted) == 0) return available[i];
  return available[0];
}

}  // namespace

const Kernels& kernels() {
  static const Kernels* chosen = choose();
  return *chosen;
}

const LatentKernel* latent_kernel() {
#ifdef CIUIC_X86_KERNELS
  const char* const name = kernels().name;
  if (std::strcmp(name, "portable") == 0 || !__builtin_cpu_supports("fma")) return nullptr;
  if (std::strcmp(name, "avx2") == 0) return &latent_avx2::latent_kernel;
#ifdef CIUIC_BFLOAT16_KERNELS
  // Intel's vector units multiply bfloat16 at half of float32's rate (measured: docs/experiments/runtime/latent-kernel.md).
  if (__builtin_cpu_supports("avx512bf16") && !__builtin_cpu_is("intel")) return &avx512bf16::latent_kernel;
#endif
  return &latent_avx512::latent_kernel;
#else
  return nullptr;
#endif
}

}  // namespace ciuic

int ciuic_abi_version() { return 20; }

const char* ciuic_cpu_kernels() { return ciuic::kernels().name; }
