# SPDX-License-Identifier: Apache-2.0
# Cross-compiles for 64-bit Arm with Debian's and Ubuntu's g++-aarch64-linux-gnu; qemu-user runs what is built.
# tests/aarch64.sh uses it. -DKVKEEP_AARCH64_ROOT=FOLDER: where the libraries for that machine lie, as usr/...

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR "qemu-aarch64;-L;/usr/aarch64-linux-gnu")

list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES KVKEEP_AARCH64_ROOT)
set(CMAKE_FIND_ROOT_PATH "${KVKEEP_AARCH64_ROOT}" /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
foreach(kind IN ITEMS LIBRARY INCLUDE PACKAGE)
  set(CMAKE_FIND_ROOT_PATH_MODE_${kind} ONLY)
endforeach()
