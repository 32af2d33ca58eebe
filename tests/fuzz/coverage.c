/* Coverage counters of the native library for libFuzzer. GCC supports only -fsanitize-coverage=trace-pc, so this file
   counts calls per hash of the code address in a table that run.py registers with libFuzzer. */
#include <stddef.h>
#include <stdint.h>

#define COUNTERS (1 << 16)

__attribute__((visibility("default"))) uint8_t ciuic_coverage_counters[COUNTERS];
__attribute__((visibility("default"))) const size_t ciuic_coverage_size = COUNTERS;

__attribute__((visibility("default"), no_sanitize("address", "undefined"), no_sanitize_coverage))
void __sanitizer_cov_trace_pc(void) {
  const uintptr_t address = (uintptr_t)__builtin_return_address(0);
  uint8_t *counter = &ciuic_coverage_counters[(address ^ (address >> 16)) % COUNTERS];
  if (*counter < 255) ++*counter;
}
