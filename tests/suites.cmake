# SPDX-License-Identifier: Apache-2.0
# Run by ctest before it begins: every suite of a GoogleTest program as one test of ctest, so that each can be asked for
# by name and a program is started 150 times, not 1,100. Patterns in SLOW are tests of their own, labelled `slow`.
#
# Reads PROGRAM, PREFIX (goes before each name) and SLOW.

cmake_policy(VERSION 3.22)
execute_process(COMMAND "${PROGRAM}" --gtest_list_tests OUTPUT_VARIABLE listed RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "tests: ${PROGRAM} --gtest_list_tests ended with ${failed}")
endif()
# Nothing passed and nothing failed.
set(all_skipped "PASSED  \\] 0 tests\\.\n(\\[  SKIPPED \\][^\n]*\n)+$")
list(JOIN SLOW ":" slow)
string(REGEX MATCHALL "\n[^ \n]+\\." suites "\n${listed}")
if(NOT suites)
  message(FATAL_ERROR "tests: ${PROGRAM} --gtest_list_tests names no suite")
endif()
foreach(suite IN LISTS suites)
  string(STRIP "${suite}" suite) # "Quotas."
  if("${suite}*" IN_LIST SLOW)
    continue()
  endif()
  string(REGEX REPLACE "\\.$" "" name "${PREFIX}${suite}")
  add_test("${name}" "${PROGRAM}" "--gtest_brief=1" "--gtest_filter=${suite}*-${slow}")
  set_tests_properties("${name}" PROPERTIES TIMEOUT 900 SKIP_REGULAR_EXPRESSION "${all_skipped}")
endforeach()
foreach(pattern IN LISTS SLOW)
  add_test("${PREFIX}${pattern}" "${PROGRAM}" "--gtest_brief=1" "--gtest_filter=${pattern}")
  set_tests_properties(
    "${PREFIX}${pattern}"
    PROPERTIES TIMEOUT 900 COST 1000 LABELS slow SKIP_REGULAR_EXPRESSION "${all_skipped}"
  )
endforeach()
