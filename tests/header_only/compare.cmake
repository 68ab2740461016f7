# SPDX-License-Identifier: Apache-2.0
# Runs one program over each of the two targets: both print the same slots, and the one of headers alone needs neither
# the library, nor Highway's, nor LibTorch.
#
#   cmake -DCOMPILED=PROGRAM -DHEADER_ONLY=PROGRAM -P compare.cmake

foreach(program IN ITEMS COMPILED HEADER_ONLY)
  execute_process(COMMAND "${${program}}" OUTPUT_VARIABLE ${program}_SLOTS COMMAND_ERROR_IS_FATAL ANY)
endforeach()
if(NOT COMPILED_SLOTS MATCHES "step 39|step 3" OR NOT COMPILED_SLOTS STREQUAL HEADER_ONLY_SLOTS)
  message(FATAL_ERROR "other slots. The compiled library:\n${COMPILED_SLOTS}\nHeaders alone:\n${HEADER_ONLY_SLOTS}")
endif()

find_program(LDD ldd)
if(LDD)
  execute_process(COMMAND "${LDD}" "${HEADER_ONLY}" OUTPUT_VARIABLE needed)
  if(needed MATCHES "lib(torch|c10|kvkeep|hwy)")
    message(FATAL_ERROR "headers alone need a library:\n${needed}")
  endif()
endif()
message("${HEADER_ONLY_SLOTS}")
