# SPDX-License-Identifier: Apache-2.0
# Target `llama`: an installed llama.cpp, or, with KVKEEP_LLAMA, one that is built from a source package for the CPU.

set(KVKEEP_LLAMA_VERSION 0.3.36) # of llama-cpp-python, which carries llama.cpp's source

# A library that a program which is linked to llama.cpp loads before it (docs/reference/llama.md#any-program): the
# structures of llama.h are compiled in, its functions are those of the program's.
function(kvkeep_add_llama_preload target)
  add_library(${target} SHARED "${PROJECT_SOURCE_DIR}/src/llama/preload.cpp")
  kvkeep_own_code(${target})
  set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET hidden)
  target_include_directories(${target} SYSTEM PRIVATE ${ARGN})
  target_link_libraries(${target} PRIVATE kvkeep ${CMAKE_DL_LIBS})
  # Programs without llama.cpp, which inherit LD_PRELOAD, load it as well.
  target_link_options(${target} PRIVATE -Wl,-z,lazy)
endfunction()

set(KVKEEP_LLAMA_HEADERS "" CACHE STRING "Folders of llama.h and ggml.h, for libkvkeep_llama_preload.so alone")
set(kvkeep_llama_headers ${KVKEEP_LLAMA_HEADERS})
foreach(name IN ITEMS llama ggml-base ggml::ggml-base)
  if(NOT KVKEEP_LLAMA_HEADERS)
    list(
      APPEND kvkeep_llama_headers
      "$<$<TARGET_EXISTS:${name}>:$<TARGET_PROPERTY:${name},INTERFACE_INCLUDE_DIRECTORIES>>"
    )
  endif()
endforeach()

if(NOT KVKEEP_LLAMA)
  find_package(llama CONFIG QUIET)
  return()
endif()

set(package "${PROJECT_SOURCE_DIR}/.cache/llama-cpp-python-${KVKEEP_LLAMA_VERSION}")
set(source "${package}/llama_cpp_python-${KVKEEP_LLAMA_VERSION}/vendor/llama.cpp")
if(NOT EXISTS "${source}/CMakeLists.txt")
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  message(STATUS "kvkeep: loading llama.cpp (llama-cpp-python ${KVKEEP_LLAMA_VERSION}, 80 MB) into ${package}")
  execute_process(
    COMMAND
      "${Python3_EXECUTABLE}" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python
      "llama-cpp-python==${KVKEEP_LLAMA_VERSION}" -d "${package}"
    RESULT_VARIABLE failed
  )
  if(failed)
    message(
      FATAL_ERROR
      "kvkeep: KVKEEP_LLAMA is on, and the source package of llama.cpp cannot be loaded (the reason stands above). "
      "Allowed: a connection, or an installed llama.cpp and -DKVKEEP_LLAMA=OFF."
    )
  endif()
  file(
    ARCHIVE_EXTRACT
    INPUT "${package}/llama_cpp_python-${KVKEEP_LLAMA_VERSION}.tar.gz"
    DESTINATION "${package}"
    PATTERNS "llama_cpp_python-${KVKEEP_LLAMA_VERSION}/vendor/llama.cpp"
  )
  file(REMOVE "${package}/llama_cpp_python-${KVKEEP_LLAMA_VERSION}.tar.gz")
endif()

set(LLAMA_USE_PREBUILT_UI OFF CACHE BOOL "")
set(LLAMA_OPENSSL OFF CACHE BOOL "")
set(system SYSTEM)
if(CMAKE_VERSION VERSION_LESS 3.25)
  set(system "")
endif()
add_subdirectory("${source}" "${PROJECT_BINARY_DIR}/llama.cpp" EXCLUDE_FROM_ALL ${system})
