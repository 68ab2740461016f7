# SPDX-License-Identifier: Apache-2.0
# What the comparison of example_serving (PROGRAM) says of a few random requests stays true: its own engine against the
# same one under restrictions, a policy that never cuts, and one that does, in a pool that shrinks.

cmake_policy(VERSION 3.22)
set(csv "${OUT}/serving_test.csv")
execute_process(
  COMMAND
    "${PROGRAM}" --requests 12 --rate 1 --pages 300,64 --answer 60:200 --policy tova,budget=32,interval=16 --policy
    tova,budget=4000 --rounds 2 --csv "${csv}" --steps "${OUT}/serving_test_steps.csv"
  RESULT_VARIABLE failed
  OUTPUT_VARIABLE table
  ERROR_VARIABLE said
)
if(failed)
  message(FATAL_ERROR "example_serving ended with ${failed}: ${said}")
endif()
message("${table}")
foreach(column "to engine" "lowest, highest" steps)
  if(NOT table MATCHES "\\| +${column} +\\|")
    message(FATAL_ERROR "no column '${column}' in the table of two rounds")
  endif()
endforeach()
if(said)
  message(FATAL_ERROR "stderr is no terminal, so nothing belongs there; given: ${said}")
endif()

foreach(policy tova,budget=32,interval=16 tova,budget=4000)
  file(STRINGS "${OUT}/serving_test_steps.csv" its_steps REGEX "^\"${policy}\",")
  if(NOT its_steps)
    message(FATAL_ERROR "no step of ${policy} in --steps; allowed the whole name of each policy")
  endif()
endforeach()

file(STRINGS "${csv}" lines)
list(POP_FRONT lines header)
string(REPLACE "," ";" names "${header}")
# "a policy, with commas" is one field.
function(field line name result)
  string(REGEX REPLACE "\"([^,\"]*),([^\"]*)\"" "\\1" line "${line}")
  string(REPLACE "\"" "" line "${line}")
  string(REPLACE "," ";" cells "${line}")
  list(FIND names "${name}" at)
  list(GET cells ${at} cell)
  set(${result} "${cell}" PARENT_SCOPE)
endfunction()
function(expect what left relation right)
  if(NOT left ${relation} right)
    message(FATAL_ERROR "${what}: given ${left}; allowed ${relation} ${right}")
  endif()
endfunction()

list(LENGTH lines rows)
expect("rows" ${rows} EQUAL 8)
set(n 0)
foreach(pool large small)
  foreach(run engine restricted cuts never)
    list(GET lines ${n} line)
    math(EXPR n "${n} + 1")
    foreach(
      name
      finished
      aborted
      same
      preempted
      computed_again
      pages_freed
      tokens
      seconds
      to_engine
      to_engine_lowest
      to_engine_highest
    )
      field("${line}" ${name} ${pool}_${run}_${name})
    endforeach()
    math(EXPR served "${${pool}_${run}_finished} + ${${pool}_${run}_aborted}")
    expect("requests served, ${pool} ${run}" ${served} EQUAL 12)
    expect("tokens are counted once, ${pool} ${run}" ${${pool}_${run}_tokens} EQUAL ${large_engine_tokens})
  endforeach()
  foreach(run engine restricted cuts never)
    expect("a round takes time, ${pool} ${run}" ${${pool}_${run}_seconds} GREATER 0)
    expect(
      "the lowest of two rounds, ${pool} ${run}"
      ${${pool}_${run}_to_engine_lowest}
      LESS_EQUAL
      ${${pool}_${run}_to_engine}
    )
    expect(
      "the highest of two rounds, ${pool} ${run}"
      ${${pool}_${run}_to_engine_highest}
      GREATER_EQUAL
      ${${pool}_${run}_to_engine}
    )
  endforeach()
  expect("the engine beside itself, ${pool}" ${${pool}_engine_to_engine} EQUAL 1)
  foreach(run engine restricted never)
    expect("answers without an event are the engine's, ${pool} ${run}" ${${pool}_${run}_same} EQUAL 1)
    expect("pages freed by events, ${pool} ${run}" ${${pool}_${run}_pages_freed} EQUAL 0)
  endforeach()
  expect("pages freed by events, ${pool}" ${${pool}_cuts_pages_freed} GREATER 0)
  expect(
    "a policy that never cuts preempts as the restricted engine, ${pool}"
    ${${pool}_never_preempted}
    EQUAL
    ${${pool}_restricted_preempted}
  )
endforeach()
expect("the large pool is enough" ${large_engine_preempted} EQUAL 0)
expect("the small pool is not" ${small_engine_preempted} GREATER 0)
expect("eviction preempts less" ${small_cuts_preempted} LESS ${small_engine_preempted})
expect(
  "the engine at its best computes less again"
  ${small_engine_computed_again}
  LESS
  ${small_restricted_computed_again}
)

# Long shared prefixes: an event has to copy what stays of them, and lacks pages for some sequences. The others are cut
# nevertheless, so that nothing is preempted; if all waited for one, as many would be as in the engine, and more.
execute_process(
  COMMAND
    "${PROGRAM}" --requests 16 --rate 1 --pages 56 --prefix 80:120 --prompt 40:120 --answer 60:120 --policy
    tova,budget=96,interval=8,prefill=cut --csv "${csv}"
  RESULT_VARIABLE failed
  OUTPUT_QUIET
  ERROR_VARIABLE said
)
if(failed)
  message(FATAL_ERROR "example_serving ended with ${failed}: ${said}")
endif()
file(STRINGS "${csv}" lines REGEX "^56,")
list(GET lines 0 engine)
list(GET lines 2 cuts)
field("${engine}" preempted engine_preempted)
field("${cuts}" preempted cuts_preempted)
field("${cuts}" pages_copied cuts_copied)
expect("pages are short without eviction" ${engine_preempted} GREATER 2)
expect("cuts that need pages" ${cuts_copied} GREATER 0)
expect("cuts that lack pages delay no other" ${cuts_preempted} LESS 3)

# refused ARGUMENTS...: exit status 2 and a sentence that says what is allowed.
function(refused)
  execute_process(COMMAND "${PROGRAM}" ${ARGN} RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE why)
  if(NOT status EQUAL 2 OR NOT why MATCHES "^example_serving: .*(allowed|missing|see --help)")
    message(FATAL_ERROR "${ARGN}: status ${status}; ${why}")
  endif()
endfunction()
refused(--page 3)
refused(--pages 30,x)
refused(--pages)
refused(--rounds 0)
refused(--prompt 9:8)
refused(--haystack "${OUT}/no-such-file.txt" --prompt 100:200)
refused(--model "${OUT}/no-such-model")
refused(--policy tova,budget=none)
refused(--requests 1 --csv "${OUT}/no-such-folder/a.csv")
