// What a process asks the operating system for before it runs these kernels.
#pragma once
#include "vec.h"
#if OCTAVO_ISA == OCTAVO_AMX
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#endif

namespace octavo {

// 0, or the error's number. Once, before any other call.
inline int prepare() {
#if OCTAVO_ISA == OCTAVO_AMX
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA of Linux
  if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA)) return errno;
#endif
  return 0;
}

}  // namespace octavo
