# SPDX-License-Identifier: Apache-2.0
# Fails unless LIBRARY exports exactly the functions of the C interface that RECORD names, which HEADER declares, under
# the name SONAME, and links nothing of LibTorch. A function that is gone breaks programs that were built before; a new
# one is written down.

execute_process(
  COMMAND "${NM}" -D --defined-only --format=posix "${LIBRARY}"
  OUTPUT_VARIABLE listed
  COMMAND_ERROR_IS_FATAL ANY
)
string(REGEX MATCHALL "(^|\n)kvkeep_[a-z_]+ " found "${listed}")
list(TRANSFORM found STRIP)
list(SORT found)
file(STRINGS "${RECORD}" recorded)
if(NOT found STREQUAL recorded)
  message(FATAL_ERROR "${LIBRARY} exports\n  ${found}\nand ${RECORD} names\n  ${recorded}")
endif()
file(READ "${HEADER}" header)
string(REGEX MATCHALL "KVKEEP_C_API [a-z0-9_ *]*kvkeep_[a-z_]+\\(" declared "${header}")
list(TRANSFORM declared REPLACE ".*(kvkeep_[a-z_]+)\\($" "\\1")
list(SORT declared)
if(NOT declared STREQUAL recorded)
  message(FATAL_ERROR "${HEADER} declares\n  ${declared}\nand ${RECORD} names\n  ${recorded}")
endif()
execute_process(COMMAND "${READELF}" -d "${LIBRARY}" OUTPUT_VARIABLE dynamic COMMAND_ERROR_IS_FATAL ANY)
if(NOT dynamic MATCHES "\\(SONAME\\)[^[]*\\[${SONAME}\\]")
  message(FATAL_ERROR "${LIBRARY} is not called ${SONAME}, which programs that link it look for:\n${dynamic}")
endif()
if(dynamic MATCHES "NEEDED[^\n]*(torch|libc10)")
  message(FATAL_ERROR "${LIBRARY} links LibTorch, which a program must not need:\n${dynamic}")
endif()
message(STATUS "${RECORD}: all functions are there, and no others")
