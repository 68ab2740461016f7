# SPDX-License-Identifier: Apache-2.0
# Target `dist`: kvkeep-VERSION.tar.gz in the build folder, the sources of the last commit without what .gitattributes
# leaves out. The same commit gives the same bytes: git sorts the names and takes owner and time from the commit.

if(NOT CMAKE_SCRIPT_MODE_FILE)
  set(stem "kvkeep-${PROJECT_VERSION}")
  add_custom_target(
    dist
    COMMAND "${CMAKE_COMMAND}" "-DSOURCE=${PROJECT_SOURCE_DIR}" "-DSTEM=${stem}" -P "${CMAKE_CURRENT_LIST_FILE}"
    WORKING_DIRECTORY "${PROJECT_BINARY_DIR}"
    VERBATIM
  )
  return()
endif()

set(archive "${STEM}.tar.gz")
execute_process(
  COMMAND git -C "${SOURCE}" archive --format=tar "--prefix=${STEM}/" HEAD
  COMMAND gzip -9 -n
  OUTPUT_FILE "${archive}.part"
  RESULTS_VARIABLE results
  ERROR_VARIABLE error
)
if(NOT results STREQUAL "0;0")
  file(REMOVE "${archive}.part")
  message(FATAL_ERROR "dist: git and gzip make no archive of ${SOURCE}; allowed a clone with a commit. ${error}")
endif()
file(RENAME "${archive}.part" "${archive}")
file(SIZE "${archive}" bytes)
file(SHA256 "${archive}" sum)
message("${CMAKE_CURRENT_BINARY_DIR}/${archive}: ${bytes} bytes, SHA-256 ${sum}")
execute_process(
  COMMAND git -C "${SOURCE}" status --porcelain
  OUTPUT_VARIABLE changes
)
if(changes)
  message("dist: the archive has the last commit; these changes are not in it:\n${changes}")
endif()
