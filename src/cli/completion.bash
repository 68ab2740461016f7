# SPDX-License-Identifier: Apache-2.0
# Bash completes what the command itself offers for a word; anything else is a file.
_kvkeep() {
  mapfile -t COMPREPLY < <("${COMP_WORDS[0]}" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2> /dev/null)
  if [[ "${COMPREPLY[0]-}" == *= ]]; then compopt -o nospace 2> /dev/null; fi
}
complete -o default -F _kvkeep kvkeep
