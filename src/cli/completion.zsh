#compdef kvkeep
# SPDX-License-Identifier: Apache-2.0
# Zsh completes what the command itself offers for a word; anything else is a file.
_kvkeep() {
  local -a found
  found=("${(@f)$("${words[1]}" __complete "${(@Q)words[2,CURRENT]}" 2> /dev/null)}")
  if [[ -z "${found[1]}" ]]; then
    _files
  else
    compadd -S '' -- ${(M)found:#*=}
    compadd -- ${found:#*=}
  fi
}
_kvkeep "$@"
