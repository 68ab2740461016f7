# SPDX-License-Identifier: Apache-2.0
# kvkeep_same_kernels(TARGET...): compiles kernel.cpp without kvkeep, and linked to each of the targets that are there.
# `same_kernels`, a target and a variable with its command, checks that all are the same instructions, fused
# multiply-adds among them, with this file:
#
#   cmake -DOBJDUMP=PROGRAM -DOBJECTS=FILE,FILE... -P kernels.cmake

if(NOT CMAKE_SCRIPT_MODE_FILE)
  function(kvkeep_same_kernels)
    set(objects "")
    set(names "")
    foreach(target IN ITEMS alone ${ARGN})
      if(NOT target STREQUAL "alone" AND NOT TARGET ${target})
        continue()
      endif()
      string(MAKE_C_IDENTIFIER "kernel_${target}" name)
      add_library(${name} OBJECT "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/kernel.cpp")
      target_compile_options(${name} PRIVATE -O3 $<$<STREQUAL:${CMAKE_SYSTEM_PROCESSOR},x86_64>:-march=haswell>)
      if(TARGET ${target})
        target_link_libraries(${name} PRIVATE ${target})
      endif()
      list(APPEND objects $<TARGET_OBJECTS:${name}>)
      list(APPEND names ${name})
    endforeach()
    list(JOIN objects "," objects)
    set(
      command
      "${CMAKE_COMMAND}"
      "-DOBJDUMP=${CMAKE_OBJDUMP}"
      "-DOBJECTS=${objects}"
      -P
      "${CMAKE_CURRENT_FUNCTION_LIST_FILE}"
    )
    set(same_kernels ${command} PARENT_SCOPE)
    add_custom_target(same_kernels COMMAND ${command} VERBATIM)
    add_dependencies(same_kernels ${names})
  endfunction()
  return()
endif()

string(REPLACE "," ";" OBJECTS "${OBJECTS}")
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND "${OBJDUMP}" -d "${object}" OUTPUT_VARIABLE listed COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX REPLACE "^.*Disassembly" "" code "${listed}")
  if(NOT DEFINED alone)
    set(alone "${code}")
  elseif(NOT code STREQUAL alone)
    message(FATAL_ERROR "kvkeep changes an engine's own code. Without it:\n${alone}\nWith it, ${object}:\n${code}")
  endif()
endforeach()
if(NOT alone MATCHES "vfmadd|fmla|fmadd")
  message(FATAL_ERROR "the kernel has no fused multiply-add, so nothing is shown:\n${alone}")
endif()
list(LENGTH OBJECTS count)
message("${count} kernels are alike:\n${alone}")
