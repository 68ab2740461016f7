# SPDX-License-Identifier: Apache-2.0
# The kernels in cuda/: compiled by nvcc where there is one, and by the host compiler for tests without a GPU.
#
#   kvkeep_kernels   static library of all cuda/*.cu; only where nvcc was found
#   kvkeep::cuda     what a program links: the kernels and what lies between them and a Keeper (src/cuda)
#
# KVKEEP_CUDA            AUTO (where nvcc is found), ON (an error without it), OFF; unless set, OFF in another project
#                        and without LibTorch, so that no build waits for nvcc unasked
# KVKEEP_CUBLAS          AUTO (where its header is beside those of the runtime), ON (an error without it), OFF. It is
#                        not linked: the library is looked for when it is used (cuda/gram.h)
# CMAKE_CUDA_ARCHITECTURES   80-real and 90-real with code that newer chips translate, unless set

set(by_default OFF)
if(PROJECT_IS_TOP_LEVEL AND KVKEEP_TORCH)
  set(by_default AUTO)
endif()
set(KVKEEP_CUDA ${by_default} CACHE STRING "Compile the CUDA kernels: AUTO, ON or OFF")
set_property(CACHE KVKEEP_CUDA PROPERTY STRINGS AUTO ON OFF)
set(KVKEEP_CUDA_FOUND FALSE)
set(KVKEEP_CUBLAS AUTO CACHE STRING "Multiply many queries with cuBLAS: AUTO, ON or OFF")
set_property(CACHE KVKEEP_CUBLAS PROPERTY STRINGS AUTO ON OFF)

# Tells sources whether they have cuBLAS, whose header lies in one of the folders `headers`.
function(kvkeep_use_cublas headers)
  find_path(KVKEEP_CUBLAS_HEADERS cublas_v2.h HINTS ${headers} NO_DEFAULT_PATH)
  mark_as_advanced(KVKEEP_CUBLAS_HEADERS)
  set(used 0)
  if(KVKEEP_CUBLAS AND KVKEEP_CUBLAS_HEADERS)
    set(used 1)
  elseif(KVKEEP_CUBLAS AND NOT KVKEEP_CUBLAS STREQUAL "AUTO")
    message(
      FATAL_ERROR
      "KVKEEP_CUBLAS is ON and there is no cublas_v2.h in ${headers}; allowed AUTO, OFF, or CUDA with it"
    )
  endif()
  set_source_files_properties(${ARGN} PROPERTIES COMPILE_DEFINITIONS KVKEEP_CUBLAS=${used})
endfunction()

if(KVKEEP_CUDA)
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90 CACHE STRING "Chips that kernels are compiled for")
  endif()
  find_program(CMAKE_CUDA_COMPILER nvcc HINTS "$ENV{CUDA_HOME}/bin" /usr/local/cuda/bin)
  if(CMAKE_CUDA_COMPILER)
    if(KVKEEP_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
      set(CMAKE_CUDA_COMPILER_LAUNCHER "${KVKEEP_CCACHE}")
    endif()
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(KVKEEP_CUDA_FOUND TRUE)
  elseif(NOT KVKEEP_CUDA STREQUAL "AUTO")
    message(
      FATAL_ERROR
      "KVKEEP_CUDA is ON and no nvcc was found; set CMAKE_CUDA_COMPILER or CUDA_HOME, or KVKEEP_CUDA=OFF"
    )
  endif()
endif()

file(GLOB KVKEEP_KERNEL_SOURCES CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/cuda/*.cu")

if(KVKEEP_CUDA_FOUND)
  add_library(kvkeep_kernels STATIC ${KVKEEP_KERNEL_SOURCES})
  set_target_properties(kvkeep_kernels PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_include_directories(kvkeep_kernels PUBLIC "${PROJECT_SOURCE_DIR}/cuda" "${PROJECT_SOURCE_DIR}/include")
  # No fused multiply-adds but where a kernel asks for them: what CPU and CUDA share must round alike.
  # The dialect by its flag: this CMake does not know those of the newest nvcc.
  target_compile_options(
    kvkeep_kernels
    PRIVATE -std=c++20 --fmad=false -Xcompiler=-Wall,-Wextra $<$<BOOL:${KVKEEP_WERROR}>:--Werror=all-warnings>
  )
  # Static: whatever version of the runtime a program brings along, the kernels have theirs.
  target_link_libraries(kvkeep_kernels PUBLIC CUDA::cudart_static ${CMAKE_DL_LIBS})
  kvkeep_use_cublas("${CUDAToolkit_INCLUDE_DIRS}" "${PROJECT_SOURCE_DIR}/cuda/gram.cu")

  kvkeep_add_library(kvkeep_cuda UNITS 1 STEMS src/cuda LINK kvkeep)
  target_include_directories(kvkeep_cuda PRIVATE src/c) # the C interface's half that needs CUDA
  target_link_libraries(kvkeep_cuda PRIVATE kvkeep_kernels)
endif()

# The kernels as C++ for the execution model: one file that includes each, since a source has one language in a folder.
function(kvkeep_model_sources result)
  set(sources "")
  foreach(kernel IN LISTS KVKEEP_KERNEL_SOURCES)
    get_filename_component(stem "${kernel}" NAME_WE)
    set(wrapper "${PROJECT_BINARY_DIR}/generated/cuda_model/${stem}.cpp")
    file(CONFIGURE OUTPUT "${wrapper}" CONTENT "#include \"${kernel}\"\n" @ONLY)
    list(APPEND sources "${wrapper}")
  endforeach()
  set(${result} "${sources}" PARENT_SCOPE)
endfunction()

# The compiler calls the execution model before every access to memory (tests/cuda_model/races.h). All that is linked
# with the kernels must be compiled so, as the linker takes an inline function from any of them. Not where a sanitizer
# is linked, which has functions of these names.
function(kvkeep_watch_accesses target)
  if(KVKEEP_SANITIZE OR CMAKE_CXX_FLAGS MATCHES "-fsanitize")
    return()
  endif()
  set(gnu --param=tsan-instrument-func-entry-exit=0)
  set(clang "SHELL:-mllvm -tsan-instrument-func-entry-exit=0")
  target_compile_options(
    ${target}
    PUBLIC -fsanitize=thread $<$<CXX_COMPILER_ID:GNU>:${gnu}> $<$<CXX_COMPILER_ID:Clang,AppleClang>:${clang}>
  )
  target_compile_definitions(${target} PUBLIC KVKEEP_WATCHED)
endfunction()

# The kernels over the execution model of tests/cuda_model, with what lies between them and a Keeper, for tests and
# benches of a machine without a GPU:
#
#   kvkeep_cuda_model     objects that a program links
#   kvkeep_cuda_modelled  a library that stands for libkvkeep_cuda.so and CUDA's runtime
function(kvkeep_add_cuda_model headers)
  kvkeep_model_sources(model_sources)
  kvkeep_glob(sources src/cuda tests/cuda_model)
  list(FILTER sources EXCLUDE REGEX "/src/cuda/gpu.cpp$") # the model's own stands for it
  if(KVKEEP_SANITIZE)
    # The check of accesses against sizes that the compiler can work out takes Clang 14 90 s for its unrolled loops; the
    # address sanitizer checks the same accesses when they are made.
    set_source_files_properties(
      "${PROJECT_BINARY_DIR}/generated/cuda_model/expected.cpp"
      PROPERTIES COMPILE_OPTIONS -fno-sanitize=object-size
    )
  endif()
  set(of_model ${sources})
  list(FILTER of_model INCLUDE REGEX "/tests/cuda_model/")
  set_source_files_properties(${of_model} PROPERTIES COMPILE_OPTIONS -fno-sanitize=thread)
  set_source_files_properties(
    "${PROJECT_SOURCE_DIR}/tests/cuda_model/resources.cpp"
    PROPERTIES COMPILE_DEFINITIONS KVKEEP_KERNEL_RESOURCES="${PROJECT_SOURCE_DIR}/docs/inside/cuda.md"
  )
  add_library(kvkeep_cuda_model OBJECT ${model_sources} ${sources})
  kvkeep_watch_accesses(kvkeep_cuda_model)
  kvkeep_own_code(kvkeep_cuda_model)
  kvkeep_unite(kvkeep_cuda_model 2)
  target_include_directories(
    kvkeep_cuda_model
    PUBLIC
      "${PROJECT_SOURCE_DIR}/tests/cuda_model"
      "${PROJECT_SOURCE_DIR}/cuda"
      "${PROJECT_SOURCE_DIR}/src/cuda"
      "${PROJECT_SOURCE_DIR}/src/c"
  )
  target_include_directories(kvkeep_cuda_model SYSTEM PUBLIC ${headers})
  target_compile_definitions(kvkeep_cuda_model PUBLIC KVKEEP_CUDA_MODEL)
  kvkeep_use_cublas(
    "${headers}"
    "${PROJECT_BINARY_DIR}/generated/cuda_model/gram.cpp"
    "${PROJECT_SOURCE_DIR}/tests/cuda_model/cublas.cpp"
  )
  target_compile_options(kvkeep_cuda_model PRIVATE $<$<CONFIG:Release>:-O2 -g1>) # with lines, which races are told by
  target_link_libraries(kvkeep_cuda_model PUBLIC kvkeep)

  add_library(kvkeep_cuda_modelled SHARED $<TARGET_OBJECTS:kvkeep_cuda_model>)
  target_include_directories(kvkeep_cuda_modelled SYSTEM INTERFACE ${headers})
  target_link_libraries(kvkeep_cuda_modelled PUBLIC kvkeep)
  # Its own runtime, whichever one a program has loaded.
  target_link_options(kvkeep_cuda_modelled PRIVATE -Wl,-Bsymbolic)
  if(KVKEEP_SANITIZE)
    target_link_options(kvkeep_cuda_modelled PRIVATE -fsanitize=address,undefined)
  endif()
endfunction()

# Headers of the CUDA runtime: of a toolkit, or those that come with LibTorch's CUDA wheels. Empty: there are none.
function(kvkeep_find_cuda_headers result)
  if(KVKEEP_CUDA_FOUND)
    set(${result} "${CUDAToolkit_INCLUDE_DIRS}" PARENT_SCOPE)
    return()
  endif()
  file(GLOB beside_torch LIST_DIRECTORIES true "${KVKEEP_TORCH_ROOT}/../nvidia/*/include")
  find_path(KVKEEP_CUDA_HEADERS cuda_bf16.h HINTS ${beside_torch} /usr/local/cuda/include)
  mark_as_advanced(KVKEEP_CUDA_HEADERS)
  if(KVKEEP_CUDA_HEADERS)
    set(${result} "${KVKEEP_CUDA_HEADERS}" PARENT_SCOPE)
  else()
    set(${result} "" PARENT_SCOPE)
  endif()
endfunction()
