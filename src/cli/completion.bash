# SPDX-License-Identifier: Apache-2.0
# Bash completes kvkeep's sub-commands and options, as the command's own --help lists them; anything else is a file.
_kvkeep() {
  local word="${COMP_WORDS[COMP_CWORD]}" about=() pattern='s/^  ([a-z]+) .*/\1/p'
  if [[ "$word" == -* ]]; then
    if ((COMP_CWORD > 1)); then about=("${COMP_WORDS[1]}"); fi
    pattern='s/^ +(-[a-z],)?(--[a-z-]+).*/\2/p'
  elif ((COMP_CWORD > 1)); then
    return
  fi
  mapfile -t COMPREPLY < <(
    compgen -W "$("${COMP_WORDS[0]}" "${about[@]}" --help 2> /dev/null | sed -nE "/^Examples:/q; $pattern")" -- "$word"
  )
}
complete -o default -F _kvkeep kvkeep
