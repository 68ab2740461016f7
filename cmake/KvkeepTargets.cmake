# SPDX-License-Identifier: Apache-2.0
# How kvkeep's own targets are made: sources by folder, warnings, sanitizers, where things land and find LibTorch.

if(PROJECT_IS_TOP_LEVEL)
  # Faster where they are installed, never required.
  find_program(KVKEEP_CCACHE ccache)
  find_program(KVKEEP_MOLD mold)
  mark_as_advanced(KVKEEP_CCACHE KVKEEP_MOLD)
  if(KVKEEP_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_CXX_COMPILER_LAUNCHER "${KVKEEP_CCACHE}")
  endif()
  if(KVKEEP_MOLD AND NOT CMAKE_CROSSCOMPILING)
    add_link_options(-fuse-ld=mold)
  endif()
endif()

set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/bin")
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/lib")
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/lib")

# The build tree needs no help: CMake puts the folder of each linked library into RPATH. Installed files find their
# siblings.
set(CMAKE_INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}" "$ORIGIN")

# An installed target that links LibTorch finds the one that it was built with.
function(kvkeep_torch_at_run_time target)
  set_property(TARGET ${target} APPEND PROPERTY INSTALL_RPATH "${KVKEEP_TORCH_LIBRARY_DIR}")
endfunction()

# The sources in the given folders, each an absolute path or one below the top of the project.
function(kvkeep_glob result)
  set(patterns "")
  foreach(folder IN LISTS ARGN)
    cmake_path(ABSOLUTE_PATH folder BASE_DIRECTORY "${PROJECT_SOURCE_DIR}" NORMALIZE)
    list(APPEND patterns "${folder}/*.cpp")
  endforeach()
  file(GLOB sources CONFIGURE_DEPENDS ${patterns})
  set(${result} "${sources}" PARENT_SCOPE)
endfunction()

# Language, rounding, warnings and sanitizers for a target of ours.
function(kvkeep_own_code target)
  # No multiplication is fused with an addition unless the code says so: core/hd.h. Who links us compiles as he likes.
  target_compile_options(
    ${target}
    PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang,AppleClang>:-ffp-contract=off -DKVKEEP_FP_CONTRACT_OFF>
  )
  target_compile_features(${target} PRIVATE cxx_std_20)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF POSITION_INDEPENDENT_CODE ON)
  target_compile_options(
    ${target}
    PRIVATE
      -Wall
      -Wextra
      -Wpedantic
      -Wshadow
      -Wnon-virtual-dtor
      -Woverloaded-virtual
      -Wno-unknown-pragmas
      # False alarms of GCC 12, for which Clang looks instead: strings that overlap themselves in operator+ (PR 105651),
      # uninitialized numbers in intrinsics of AVX-512 (PR 105593), std::regex and designated temporaries, programs that
      # replace operator new.
      $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>
      $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-uninitialized>
      $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-maybe-uninitialized>
      $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-mismatched-new-delete>
  )
  if(KVKEEP_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(KVKEEP_SANITIZE)
    # vptr checks need the run-time type information that LibTorch's libraries hide.
    set(flags -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined)
    target_compile_options(
      ${target}
      PRIVATE
        ${flags}
        -fno-omit-frame-pointer
        $<$<CXX_COMPILER_ID:Clang>:-fsanitize-ignorelist=${CMAKE_CURRENT_FUNCTION_LIST_DIR}/sanitizer_ignorelist.txt>
    )
    target_link_options(${target} PRIVATE ${flags})
    # Functions with more accesses than these call their checks instead of holding them: unrolled loops compile twice
    # as fast.
    target_compile_options(
      ${target}
      PRIVATE "$<$<CXX_COMPILER_ID:Clang>:SHELL:-mllvm -asan-instrumentation-with-call-threshold=500>"
    )
    # Instruction sets between the plain one and AVX2 differ little, and each is dear to compile; some loops need
    # vectors whose size the compiler knows.
    target_compile_definitions(
      ${target}
      PRIVATE
        KVKEEP_SANITIZED
        "HWY_DISABLED_TARGETS=(HWY_SSSE3|HWY_SSE4|HWY_SVE|HWY_SVE2|HWY_SVE_256|HWY_SVE2_128|HWY_RVV)"
    )
  endif()
endfunction()

# For what spends its time in the library, as the command and the tests do: under the sanitizers compiled quickly,
# without the checks of each reference, which are dear to compile and stand in the library.
function(kvkeep_sanitize_lightly target)
  if(KVKEEP_SANITIZE)
    target_compile_options(${target} PRIVATE -O0 -fno-sanitize=null,alignment,object-size)
  endif()
endfunction()

# Compiles the sources of a target in PARTS units instead of one by one: headers are read and templates instantiated
# once per unit. GCC's precompiled headers cost more than they gave: 3 s per file to load 370 MB. Names in anonymous
# namespaces must then be unique within a target.
function(kvkeep_unite target parts)
  if(NOT KVKEEP_UNITY)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  # Highway compiles such a file once per instruction set by including it again. Kernels of the execution model have
  # names of their own.
  set(alone ${sources})
  list(FILTER alone INCLUDE REGEX "_lanes\\.cpp$|/lm/kernels\\.cpp$|/generated/cuda_model/")
  set_source_files_properties(${alone} TARGET_DIRECTORY ${target} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  list(LENGTH sources count)
  list(LENGTH alone count_alone)
  math(EXPR batch "(${count} - ${count_alone} + ${parts} - 1) / ${parts}")
  # GCC collects garbage from 128 MB on, which takes a tenth of its time.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-heapsize=1000000>)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${batch})
endfunction()

# A library NAME from the .cpp files of some folders but those LEFT_OUT, compiled in UNITS units, with TORCH one that
# knows LibTorch; while there are none yet, an empty name that links what it would.
function(kvkeep_add_library name)
  cmake_parse_arguments(arg "TORCH" "UNITS" "STEMS;LINK;LEFT_OUT" ${ARGN})
  kvkeep_glob(sources ${arg_STEMS})
  foreach(source IN LISTS arg_LEFT_OUT)
    list(REMOVE_ITEM sources "${PROJECT_SOURCE_DIR}/src/${source}.cpp")
  endforeach()
  string(REPLACE "kvkeep_" "" short "${name}")
  if(sources)
    add_library(${name} ${sources})
    kvkeep_own_code(${name})
    if(arg_TORCH)
      target_link_libraries(${name} PRIVATE kvkeep_torch::openmp) # loops of at::parallel_for
      kvkeep_torch_at_run_time(${name})
    endif()
    kvkeep_unite(${name} ${arg_UNITS})
    if(BUILD_SHARED_LIBS AND CMAKE_EXECUTABLE_FORMAT STREQUAL "ELF")
      # The library runs its own copies of inline functions, not those that a program compiled with flags of its own.
      target_link_options(${name} PRIVATE -Wl,-Bsymbolic-functions)
    endif()
    set_target_properties(
      ${name}
      PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
    )
    # Highway compiles a file once per instruction set by including it again under its own name.
    list(TRANSFORM arg_STEMS PREPEND "${PROJECT_SOURCE_DIR}/" OUTPUT_VARIABLE folders)
    target_include_directories(${name} PRIVATE ${folders})
    target_link_libraries(
      ${name}
      PUBLIC ${arg_LINK} Threads::Threads
      PRIVATE hwy::hwy $<BUILD_INTERFACE:$<TARGET_NAME_IF_EXISTS:nlohmann_json::nlohmann_json>>
    )
  else()
    add_library(${name} INTERFACE)
    target_link_libraries(${name} INTERFACE ${arg_LINK})
  endif()
  add_library(kvkeep::${short} ALIAS ${name})
  set_target_properties(${name} PROPERTIES EXPORT_NAME ${short})
endfunction()
