/* Coverage of the native library for libFuzzer, from a compiler that has -fsanitize-coverage=trace-pc only (GCC): one
   counter per hash of the address, and the tables that libFuzzer wants to be told of. */
#include <stddef.h>
#include <stdint.h>

#define COUNTERS (1 << 16)

__attribute__((visibility("default"))) uint8_t ciuic_coverage_counters[COUNTERS];
__attribute__((visibility("default"))) const size_t ciuic_coverage_size = COUNTERS;

__attribute__((visibility("default"), no_sanitize("address", "undefined"), no_sanitize_coverage))
void __sanitizer_cov_trace_pc(void) {
  const uintptr_t place = (uintptr_t)__builtin_return_address(0);
  uint8_t *counter = &ciuic_coverage_counters[(place ^ (place >> 16)) % COUNTERS];
  if (*counter < 255) ++*counter;
}
