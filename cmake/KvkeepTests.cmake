# SPDX-License-Identifier: Apache-2.0
# How tests are found: every suite of a GoogleTest program is one test of ctest.

find_package(GTest REQUIRED)

# A program as PARTS tests of ctest, each with a share of its tests; a GTEST_FILTER that follows leaves some out.
function(kvkeep_add_test_parts target parts)
  math(EXPR last "${parts} - 1")
  foreach(part RANGE ${last})
    add_test(NAME ${target}.${part} COMMAND ${target})
    set_tests_properties(
      ${target}.${part}
      PROPERTIES ENVIRONMENT "GTEST_TOTAL_SHARDS=${parts};GTEST_SHARD_INDEX=${part};${ARGN}" TIMEOUT 3600
    )
  endforeach()
endfunction()

# Every suite of a program as one test of ctest (tests/suites.cmake); SLOW has patterns of tests that are labelled so.
# Under the sanitizers it is one test: each start costs more there than most suites.
function(kvkeep_discover_tests target)
  cmake_parse_arguments(arg "" "PREFIX" "SLOW" ${ARGN})
  if(KVKEEP_SANITIZE)
    kvkeep_add_test_parts(${target} 1)
    return()
  endif()
  set(script "${CMAKE_CURRENT_BINARY_DIR}/${target}_suites.cmake")
  file(
    GENERATE OUTPUT "${script}"
    CONTENT
      "set(PROGRAM \"$<TARGET_FILE:${target}>\")
set(PREFIX \"${arg_PREFIX}\")
set(SLOW \"${arg_SLOW}\")
include(\"${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../tests/suites.cmake\")
"
  )
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES "${script}")
endfunction()
