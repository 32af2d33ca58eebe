// Which kernels of a file are compiled. NVRTC compiles one kernel at a time, because a launch waits for it: with
// -DCIUIC_ONE and -DCIUIC_ONE_<kernel>=, (a comma) a file defines that kernel only. Without these macros it defines all.
//
// CIUIC_IF_CHOSEN(kernel)(definition) is the definition or nothing. The comma makes CIUIC_KEEP the second argument of
// CIUIC_SECOND; without it CIUIC_DROP is. A kernel whose definition contains directives stands in
//   #if !defined(CIUIC_ONE) || defined(CIUIC_ONE_<kernel>)
#ifndef CIUIC_ONE_KERNEL_H
#define CIUIC_ONE_KERNEL_H

#define CIUIC_KEEP(...) __VA_ARGS__
#ifdef CIUIC_ONE
#define CIUIC_DROP(...)
#define CIUIC_SECOND(first, second, ...) second
#define CIUIC_KEEP_IF(comma) CIUIC_SECOND(comma CIUIC_KEEP, CIUIC_DROP, )
#define CIUIC_IF_CHOSEN(kernel) CIUIC_KEEP_IF(CIUIC_ONE_##kernel)
#else
#define CIUIC_IF_CHOSEN(kernel) CIUIC_KEEP
#endif

#endif
