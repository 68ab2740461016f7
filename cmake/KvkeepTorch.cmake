# SPDX-License-Identifier: Apache-2.0
# Finds LibTorch and offers it as three imported targets:
#
#   kvkeep_torch::c10        headers, libc10
#   kvkeep_torch::torch_cpu  the above and libtorch_cpu: all that kvkeep itself links
#   kvkeep_torch::torch      the above, the C++ frontend (torch/torch.h, autograd, optimizers) and CUDA where the wheel
#                            has it: the trainer
#
# Why not find_package(Torch): the wheel most machines have is a CUDA build, and its TorchConfig.cmake looks for a CUDA
# toolkit even where only the CPU part is wanted; it fails without one and with one that is too new. Headers and two
# libraries are all that is needed here.
#
# Where it looks, first hit wins:
#   1. Torch_DIR (variable or environment): the folder of TorchConfig.cmake, or any root of a LibTorch
#   2. every entry of CMAKE_PREFIX_PATH (variable or environment)
#   3. .venv beside the top CMakeLists.txt
#   4. KVKEEP_TORCH_HINT: for an installed kvkeep, the LibTorch it was built with
#   5. python3 -c 'import torch'
#
# Sets KVKEEP_TORCH_FOUND, KVKEEP_TORCH_VERSION, KVKEEP_TORCH_ROOT, KVKEEP_TORCH_LIBRARY_DIR, KVKEEP_TORCH_WHY_NOT.
# This file is used by kvkeep's own build and, installed, by kvkeepConfig.cmake.

set(KVKEEP_TORCH_MINIMUM 2.7)

# A root holds include/ATen and lib/libtorch_cpu: of the LibTorch archive, or of the Python package.
function(_kvkeep_torch_is_root folder result)
  if(
    EXISTS "${folder}/include/ATen/core/Tensor.h"
    AND EXISTS "${folder}/lib/libtorch_cpu${CMAKE_SHARED_LIBRARY_SUFFIX}"
  )
    set(${result} TRUE PARENT_SCOPE)
  else()
    set(${result} FALSE PARENT_SCOPE)
  endif()
endfunction()

# The first folder of the list, or Python environment among the list, that holds a LibTorch.
function(_kvkeep_torch_search result)
  set(${result} "" PARENT_SCOPE)
  foreach(start IN LISTS ARGN)
    if(NOT start)
      continue()
    endif()
    file(TO_CMAKE_PATH "${start}" start)
    # Torch_DIR and torch.utils.cmake_prefix_path name <root>/share/cmake/Torch and <root>/share/cmake.
    file(
      GLOB packages
      LIST_DIRECTORIES true
      "${start}/lib/python3*/site-packages/torch"
      "${start}/lib/python3*/dist-packages/torch"
    )
    foreach(
      folder
      IN
      ITEMS "${start}" "${start}/../../.." "${start}/../.." "${start}/torch" "${start}/libtorch" ${packages}
    )
      _kvkeep_torch_is_root("${folder}" is_root)
      if(is_root)
        file(REAL_PATH "${folder}" folder)
        set(${result} "${folder}" PARENT_SCOPE)
        return()
      endif()
    endforeach()
  endforeach()
endfunction()

function(_kvkeep_torch_ask_python result)
  set(${result} "" PARENT_SCOPE)
  find_program(KVKEEP_PYTHON3 python3)
  mark_as_advanced(KVKEEP_PYTHON3)
  if(NOT KVKEEP_PYTHON3)
    return()
  endif()
  # find_spec locates the package without the seconds that importing it takes.
  execute_process(
    COMMAND
      "${KVKEEP_PYTHON3}" -c
      "import importlib.util as u, os; print(os.path.dirname(getattr(u.find_spec('torch'), 'origin', None) or ''))"
    OUTPUT_VARIABLE folder
    OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_QUIET
  )
  _kvkeep_torch_search(root "${folder}")
  set(${result} "${root}" PARENT_SCOPE)
endfunction()

# "2.11.0" out of the headers: they are what is compiled against.
function(_kvkeep_torch_read_version root result)
  set(${result} "" PARENT_SCOPE)
  foreach(header IN ITEMS torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    if(EXISTS "${root}/include/${header}")
      file(READ "${root}/include/${header}" text)
      if(text MATCHES "TORCH_VERSION_MAJOR +([0-9]+).*TORCH_VERSION_MINOR +([0-9]+).*TORCH_VERSION_PATCH +([0-9]+)")
        set(${result} "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3}" PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
endfunction()

# The C++ ABI flag that this LibTorch says it was built with; wheels that no longer mention it (the old ABI is gone
# since 2.7) need none.
function(_kvkeep_torch_read_abi root result)
  set(${result} "" PARENT_SCOPE)
  if(EXISTS "${root}/share/cmake/Torch/TorchConfig.cmake")
    file(STRINGS "${root}/share/cmake/Torch/TorchConfig.cmake" lines REGEX "_GLIBCXX_USE_CXX11_ABI=[01]")
    if(lines MATCHES "(_GLIBCXX_USE_CXX11_ABI=[01])")
      set(${result} "${CMAKE_MATCH_1}" PARENT_SCOPE)
    endif()
  endif()
endfunction()

# LibTorch brings its own OpenMP runtime. at::parallel_for is a template: it runs serially unless *our* code is compiled
# with -fopenmp, and then it must use that same runtime, not a second one with its own thread pool. So: compile with the
# flag, link the runtime beside libtorch_cpu.
function(_kvkeep_torch_add_openmp root)
  add_library(kvkeep_torch::openmp INTERFACE IMPORTED)
  file(STRINGS "${root}/include/ATen/Config.h" parallel REGEX "define AT_PARALLEL_OPENMP 1")
  if(NOT parallel)
    return()
  endif()
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Clang's -fopenmp means libomp, a second runtime next to LibTorch's libgomp. Correct but serial is the better half
    # of that choice.
    message(
      STATUS
      "kvkeep: ${CMAKE_CXX_COMPILER_ID} would bring a second OpenMP runtime; CPU rows run on one thread in this build"
    )
    return()
  endif()
  target_compile_options(kvkeep_torch::openmp INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
  file(GLOB bundled "${root}/lib/libgomp*.so*")
  if(bundled)
    list(GET bundled 0 bundled)
    target_link_libraries(kvkeep_torch::openmp INTERFACE "${bundled}")
  else()
    target_link_libraries(kvkeep_torch::openmp INTERFACE gomp)
  endif()
endfunction()

function(_kvkeep_torch_add_targets root)
  _kvkeep_torch_read_abi("${root}" abi)
  set(library_dir "${root}/lib")
  foreach(name IN ITEMS c10 torch_cpu)
    add_library(kvkeep_torch::${name} SHARED IMPORTED)
    set_target_properties(
      kvkeep_torch::${name}
      PROPERTIES
        IMPORTED_LOCATION "${library_dir}/${CMAKE_SHARED_LIBRARY_PREFIX}${name}${CMAKE_SHARED_LIBRARY_SUFFIX}"
        INTERFACE_INCLUDE_DIRECTORIES "${root}/include"
        INTERFACE_COMPILE_DEFINITIONS "${abi}"
    )
  endforeach()
  target_link_libraries(kvkeep_torch::torch_cpu INTERFACE kvkeep_torch::c10)
  # A CUDA wheel's libtorch_cpu finds its nvidia/* libraries through its own RPATH at run time; the linker need not.
  target_link_options(kvkeep_torch::torch_cpu INTERFACE "LINKER:--allow-shlib-undefined")

  add_library(kvkeep_torch::torch INTERFACE IMPORTED)
  target_include_directories(kvkeep_torch::torch SYSTEM INTERFACE "${root}/include/torch/csrc/api/include")
  # libtorch.so is an empty library that needs all the others; an --as-needed linker drops it and with it CUDA
  # ("is_available() is false").
  target_link_libraries(
    kvkeep_torch::torch
    INTERFACE
      kvkeep_torch::torch_cpu
      "-Wl,--push-state,--no-as-needed"
      "${library_dir}/${CMAKE_SHARED_LIBRARY_PREFIX}torch${CMAKE_SHARED_LIBRARY_SUFFIX}"
      "-Wl,--pop-state"
  )
  _kvkeep_torch_add_openmp("${root}")
endfunction()

# Finds LibTorch and makes the targets, once; on failure leaves the reason in KVKEEP_TORCH_WHY_NOT.
macro(kvkeep_find_torch)
  set(KVKEEP_TORCH_FOUND FALSE)
  set(_kvkeep_asked "${Torch_DIR}")
  if(NOT _kvkeep_asked)
    set(_kvkeep_asked "$ENV{Torch_DIR}")
  endif()
  string(REPLACE ":" ";" _kvkeep_prefixes "$ENV{CMAKE_PREFIX_PATH}")
  _kvkeep_torch_search(KVKEEP_TORCH_ROOT "${_kvkeep_asked}")
  if(_kvkeep_asked AND NOT KVKEEP_TORCH_ROOT)
    set(KVKEEP_TORCH_WHY_NOT "Torch_DIR is '${_kvkeep_asked}', and no include/ATen with lib/libtorch_cpu is there")
  else()
    if(NOT KVKEEP_TORCH_ROOT)
      _kvkeep_torch_search(
        KVKEEP_TORCH_ROOT
        ${CMAKE_PREFIX_PATH}
        ${_kvkeep_prefixes}
        "${CMAKE_CURRENT_SOURCE_DIR}/.venv"
        "${KVKEEP_TORCH_HINT}"
      )
    endif()
    if(NOT KVKEEP_TORCH_ROOT)
      _kvkeep_torch_ask_python(KVKEEP_TORCH_ROOT)
    endif()
    if(NOT KVKEEP_TORCH_ROOT)
      set(
        KVKEEP_TORCH_WHY_NOT
        "none in Torch_DIR, CMAKE_PREFIX_PATH, ${CMAKE_CURRENT_SOURCE_DIR}/.venv, nor importable by python3"
      )
    endif()
  endif()

  if(KVKEEP_TORCH_ROOT)
    set(KVKEEP_TORCH_LIBRARY_DIR "${KVKEEP_TORCH_ROOT}/lib")
    _kvkeep_torch_read_version("${KVKEEP_TORCH_ROOT}" KVKEEP_TORCH_VERSION)
    if(NOT KVKEEP_TORCH_VERSION OR KVKEEP_TORCH_VERSION VERSION_LESS KVKEEP_TORCH_MINIMUM)
      string(
        CONCAT KVKEEP_TORCH_WHY_NOT
        "${KVKEEP_TORCH_ROOT} is LibTorch '${KVKEEP_TORCH_VERSION}'; allowed are ${KVKEEP_TORCH_MINIMUM} and newer "
        "(older ones differ in the C++ ABI)"
      )
    else()
      set(KVKEEP_TORCH_FOUND TRUE)
      if(NOT TARGET kvkeep_torch::torch_cpu)
        _kvkeep_torch_add_targets("${KVKEEP_TORCH_ROOT}")
        message(STATUS "kvkeep: LibTorch ${KVKEEP_TORCH_VERSION} in ${KVKEEP_TORCH_ROOT}")
      endif()
    endif()
  endif()
endmacro()
