# Fails unless LIBRARY exports exactly the functions of the C interface that RECORD names. A function that is gone
# breaks programs that were built before; a new one is written down.

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
message(STATUS "${RECORD}: all functions are there, and no others")
