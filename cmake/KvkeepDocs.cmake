# SPDX-License-Identifier: Apache-2.0
# Target `docs`: the pages and the reference of the API as a site, by Doxygen, in docs/html of the build folder. A
# warning is an error.

find_package(Doxygen 1.9 QUIET)
find_package(Python3 QUIET COMPONENTS Interpreter)
if(NOT DOXYGEN_FOUND OR NOT Python3_FOUND)
  add_custom_target(
    docs
    COMMAND
      "${CMAKE_COMMAND}" -E echo
      "kvkeep: the site is made by Doxygen and Python 3, which are not here (apt-get install doxygen python3)"
    COMMAND "${CMAKE_COMMAND}" -E false
  )
  return()
endif()
set(DOXYGEN_PROJECT_BRIEF "${PROJECT_DESCRIPTION}")
set(DOXYGEN_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/docs")
set(DOXYGEN_USE_MDFILE_AS_MAINPAGE "${CMAKE_CURRENT_SOURCE_DIR}/docs/README.md")
set(DOXYGEN_GENERATE_TREEVIEW YES)
set(DOXYGEN_HTML_EXTRA_STYLESHEET "${CMAKE_CURRENT_LIST_DIR}/docs.css")
set(DOXYGEN_STRIP_CODE_COMMENTS NO)
set(DOXYGEN_IMAGE_PATH docs examples/lab/docs)
set(DOXYGEN_INPUT_FILTER "'${Python3_EXECUTABLE}' '${CMAKE_CURRENT_LIST_DIR}/docs_filter.py'")
set(DOXYGEN_STRIP_FROM_PATH "${CMAKE_CURRENT_SOURCE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}/include")
set(DOXYGEN_STRIP_FROM_INC_PATH "${CMAKE_CURRENT_SOURCE_DIR}/include")
set(DOXYGEN_FILE_PATTERNS *.h *.md)
set(DOXYGEN_EXCLUDE_PATTERNS */simd/* *-inl.h */llama/bodies.h) # not the interface
set(DOXYGEN_EXCLUDE_SYMBOLS *detail*)
set(DOXYGEN_EXTRACT_ALL YES)
set(DOXYGEN_JAVADOC_AUTOBRIEF YES)
set(DOXYGEN_HIDE_UNDOC_RELATIONS YES)
set(DOXYGEN_HAVE_DOT NO)
set(DOXYGEN_MACRO_EXPANSION YES)
set(DOXYGEN_EXPAND_ONLY_PREDEF YES)
set(DOXYGEN_PREDEFINED KVKEEP_INLINE=inline KVKEEP_HD=)
set(DOXYGEN_WARN_AS_ERROR FAIL_ON_WARNINGS)
set(DOXYGEN_QUIET YES)
doxygen_add_docs(
  docs
  include/kvkeep
  README.md
  CHANGELOG.md
  CONTRIBUTING.md
  docs
  examples/lab/README.md
  examples/lab/docs
  examples/model/README.md
  examples/serving/README.md
  tests/golden/README.md
  COMMENT "The site, in ${CMAKE_CURRENT_BINARY_DIR}/docs/html"
)
