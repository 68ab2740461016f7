// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/cli/program.h"

int main(int argc, char** argv) { return kvkeep::cli::run(kvkeep::cli::Program(), argc, argv); }
