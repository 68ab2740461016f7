# SPDX-License-Identifier: Apache-2.0
# The libraries that kvkeep needs: of the project around it, installed, or, with KVKEEP_FETCH_DEPENDENCIES, loaded.
#
#   hwy::hwy                      always
#   Eigen3::Eigen                 with KVKEEP_FOLDING
#   nlohmann_json::nlohmann_json  with KVKEEP_FILES
#
# A project that has declared `highway`, `eigen` or `nlohmann_json` to FetchContent itself decides what is loaded.

option(KVKEEP_FETCH_DEPENDENCIES "Load Highway, Eigen and nlohmann_json where they are not installed" OFF)

# Highway's library alone, static, and nothing of it in the project's settings. KvkeepInstall.cmake installs it: its own
# rules make no CMake package.
function(kvkeep_add_highway)
  foreach(part IN ITEMS CONTRIB EXAMPLES INSTALL TESTS)
    set(HWY_ENABLE_${part} OFF CACHE BOOL "")
  endforeach()
  set(CMAKE_POLICY_DEFAULT_CMP0077 NEW) # its options are these variables
  set(BUILD_SHARED_LIBS OFF)
  set(BUILD_TESTING OFF)
  FetchContent_MakeAvailable(highway)
  set_target_properties(hwy PROPERTIES POSITION_INDEPENDENT_CODE ON)
  if(NOT TARGET hwy::hwy)
    add_library(hwy::hwy ALIAS hwy)
  endif()
  set(KVKEEP_HIGHWAY_SOURCE "${highway_SOURCE_DIR}" PARENT_SCOPE)
endfunction()

# Headers alone: nothing of theirs is configured.
macro(kvkeep_add_headers name target folder)
  FetchContent_MakeAvailable(${name})
  if(NOT TARGET ${target})
    add_library(${target} INTERFACE IMPORTED GLOBAL)
    target_include_directories(${target} SYSTEM INTERFACE "${${name}_SOURCE_DIR}${folder}")
  endif()
endmacro()

# kvkeep_need(TARGET PACKAGE VERSION PACKAGE_OF_DEBIAN NAME URL SHA256): TARGET is there afterwards.
macro(
  kvkeep_need
  target
  package
  version
  debian
  name
  url
  hash
)
  if(NOT TARGET ${target})
    find_package(${package} ${version} QUIET NO_MODULE)
  endif()
  if(NOT TARGET ${target})
    if(NOT KVKEEP_FETCH_DEPENDENCIES)
      message(
        FATAL_ERROR
        "kvkeep needs ${package} ${version} or newer, and none is installed. On Debian and Ubuntu: apt-get install "
        "${debian}. Or pass -DKVKEEP_FETCH_DEPENDENCIES=ON, and it is loaded from ${url}."
      )
    endif()
    include(FetchContent)
    if(POLICY CMP0135)
      cmake_policy(SET CMP0135 NEW) # files of an archive have the time at which it was unpacked
    endif()
    FetchContent_Declare(${name} URL "${url}" URL_HASH SHA256=${hash} ${ARGN})
    if("${name}" STREQUAL "highway")
      kvkeep_add_highway()
    elseif("${name}" STREQUAL "eigen")
      kvkeep_add_headers(eigen Eigen3::Eigen "")
    else()
      kvkeep_add_headers(nlohmann_json nlohmann_json::nlohmann_json "/include")
    endif()
  endif()
endmacro()

find_package(Threads REQUIRED)
kvkeep_need(
  hwy::hwy
  hwy
  1.0
  libhwy-dev
  highway
  https://github.com/google/highway/archive/1.0.3.tar.gz
  566fc77315878473d9a6bd815f7de78c73734acdcb745c3dde8579560ac5440e
)
if(KVKEEP_FOLDING)
  kvkeep_need(
    Eigen3::Eigen
    Eigen3
    3.4
    libeigen3-dev
    eigen
    https://gitlab.com/libeigen/eigen/-/archive/3.4.0/eigen-3.4.0.tar.bz2
    b4c198460eba6f28d34894e3a5710998818515104d6e74e5cc331ce31e46e626
    SOURCE_SUBDIR
    unused # no CMakeLists.txt lies there
  )
endif()
if(KVKEEP_FILES)
  kvkeep_need(
    nlohmann_json::nlohmann_json
    nlohmann_json
    3.10
    nlohmann-json3-dev
    nlohmann_json
    https://github.com/nlohmann/json/archive/v3.11.2.tar.gz
    d69f9deb6a75e2580465c6c4c5111b89c4dc2fa94e3a85fcd2ffcd9a143d9273
    SOURCE_SUBDIR
    unused
  )
endif()
