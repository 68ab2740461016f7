// kvkeep: the command.

#include <unistd.h>
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <csignal>
#include <cstdio>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "commands.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/version.h"
#include "progress.h"

namespace kvkeep::cli {
namespace {

constexpr const char* kSubcommands = "generate, eval, replay, record, calibrate, plan, policies, doctor";
constexpr int kRefused = 2, kFailed = 1, kSignalled = 128;

constexpr const char* kExamples = R"(
Examples:
  kvkeep policies                                           what there is to choose from
  kvkeep eval --model examples/model --task ask --budgets 128,64
  kvkeep generate --model examples/model --task chain --seed 7 --policy ams-tova,budget=96,interval=32 --max-new-tokens 200
  kvkeep record --model examples/model --ids-file prompt.txt --policy tova,budget=96,interval=32 --out event.safetensors
  kvkeep plan --shape qwen7b --policy ams-tova,budget=1024 --batch 16 --length 32768
  kvkeep replay event.safetensors --policy ams-tova,budget=96,interval=32 --out kept.safetensors

Results go to stdout (-o md|csv|json), everything else to stderr. Exit status: 0 done; 2 the input was refused; 1 anything else; 130 Ctrl-C.
)";

extern "C" void stop(int signal) {
  io::remove_unfinished_files();
  constexpr char kLine[] = "\nkvkeep: stopped, nothing half-written is left\n";
  static_cast<void>(!::write(STDERR_FILENO, kLine, sizeof kLine - 1));
  ::_exit(kSignalled + signal);
}

int refuse_usage(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* where = &app;
  while (!where->get_subcommands().empty()) where = where->get_subcommands().front();
  std::string full = where->get_name();
  for (const CLI::App* parent = where->get_parent(); parent != nullptr; parent = parent->get_parent())
    full = parent->get_name() + " " + full;
  const std::vector<std::string> rest = app.remaining();
  if (where == &app && !rest.empty() && !rest.front().starts_with("-"))
    note(text("there is no sub-command '", rest.front(), "'; allowed ", kSubcommands));
  else
    note(text(error.what(), "; see ", full, " --help"));
  return kRefused;
}

int run(int argc, char** argv) {
  CLI::App app("Decides which entries of a language model's key-value cache stay, and moves them.", "kvkeep");
  app.set_version_flag("--version", std::string("kvkeep ") + kVersion, "print the version");
  app.require_subcommand(1);
  app.footer(kExamples);
  app.get_formatter()->column_width(42);
  const std::vector<Run> runs{add_generate(app), add_eval(app), add_replay(app), add_record(app), add_calibrate(app), add_plan(app), add_policies(app), add_doctor(app)};
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    return refuse_usage(app, error);
  }
  const std::vector<CLI::App*> commands = app.get_subcommands([](const CLI::App*) { return true; });
  for (std::size_t i = 0; i < runs.size(); ++i)
    if (commands[i]->parsed()) runs[i]();
  return 0;
}

}  // namespace
}  // namespace kvkeep::cli

int main(int argc, char** argv) {
  using namespace kvkeep::cli;
  std::signal(SIGINT, stop);
  std::signal(SIGTERM, stop);
  std::signal(SIGPIPE, SIG_IGN);
  try {
    return run(argc, argv);
  } catch (const kvkeep::InvalidArgument& error) {
    note(error.what());
    return kRefused;
  } catch (const kvkeep::Unsupported& error) {
    note(error.what());
    return kRefused;
  } catch (const std::exception& error) {
    note(error.what());
    return kFailed;
  }
}
