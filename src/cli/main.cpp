#include "kvkeep/cli/program.h"

int main(int argc, char** argv) { return kvkeep::cli::run(kvkeep::cli::Program(), argc, argv); }
