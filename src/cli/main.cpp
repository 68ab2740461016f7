// kvkeep: the command.

#include <fcntl.h>
#include <unistd.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "build.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/version.h"
#include "options.h"
#include "progress.h"
#include "table.h"

namespace kvkeep::cli {
namespace {

constexpr int kRefused = 2, kFailed = 1, kSignalled = 128;

constexpr const char* kConventions = R"(
Results go to stdout (-o md|csv|json), everything else to stderr.
Exit status: 0 done; 2 the input was refused; 1 any other failure; 130 Ctrl-C.
)";

extern "C" void stop(int signal) {
  io::remove_unfinished_files();
  constexpr char kLine[] = "\nkvkeep: stopped; no half-written file is left\n";
  static_cast<void>(!::write(STDERR_FILENO, kLine, sizeof kLine - 1));
  ::_exit(kSignalled + signal);
}

// A signal that the parent has set to be ignored, as nohup and shells with background jobs do, stays ignored.
void stop_at(int signal) {
  if (std::signal(signal, stop) == SIG_IGN) std::signal(signal, SIG_IGN);
}

// If a standard stream is closed, the next file that is opened would get its number and receive what is printed.
// /dev/null takes its place, opened in the wrong direction: using it fails, as it does for a closed stream.
void occupy_closed_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(stream, F_GETFD) < 0)
      static_cast<void>(
          ::open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY));  // gets the lowest free number
}

// The sub-commands of this build, as a list in a sentence.
std::string subcommands_of(const CLI::App& app) {
  std::string names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App* c) { return !c->get_group().empty(); }))
    names += (names.empty() ? "" : ", ") + command->get_name();
  return names;
}

int refuse_usage(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* where = &app;
  while (!where->get_subcommands().empty()) where = where->get_subcommands().front();
  std::string full = where->get_name();
  for (const CLI::App* parent = where->get_parent(); parent != nullptr; parent = parent->get_parent())
    full = parent->get_name() + " " + full;
  const std::vector<std::string> rest = app.remaining();
  if (where == &app && !rest.empty() && !rest.front().starts_with("-"))
    note(text("there is no sub-command '", rest.front(), "'; allowed ", subcommands_of(app)));
  else
    note(text(error.what(), "; see ", full, " --help"));
  return kRefused;
}

int run(int argc, char** argv) {
  CLI::App app("Decides which entries of a language model's key-value cache stay, and moves them.", "kvkeep");
  app.set_version_flag("--version", std::string("kvkeep ") + kVersion, "print the version");
  app.require_subcommand(1);
  app.footer(text(main_examples(), kConventions));
  app.get_formatter()->column_width(42);
  const std::vector<Run> runs = add_commands(app);
  require_decimal_integers(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    std::ostringstream shown;
    const int code = app.exit(help, shown, shown);
    print(shown.str());
    return code;
  } catch (const CLI::ParseError& error) {
    return refuse_usage(app, error);
  }
  const std::vector<CLI::App*> commands = app.get_subcommands([](const CLI::App*) { return true; });
  for (std::size_t i = 0; i < runs.size(); ++i)
    if (commands[i]->parsed()) {
      prepare(*commands[i], argv);
      for (const int signal : {SIGINT, SIGTERM, SIGHUP}) stop_at(signal);  // only now: a restart would lose them
      runs[i]();
    }
  return 0;
}

}  // namespace
}  // namespace kvkeep::cli

int main(int argc, char** argv) {
  using namespace kvkeep::cli;
  occupy_closed_streams();
  for (const int signal : {SIGPIPE, SIGXFSZ}) std::signal(signal, SIG_IGN);  // the write fails instead, with a message
  try {
    return run(argc, argv);
  } catch (const kvkeep::InvalidArgument& error) {
    note(error.what());
    return kRefused;
  } catch (const kvkeep::Unsupported& error) {
    note(error.what());
    return kRefused;
  } catch (const std::bad_alloc&) {
    note("there is not enough memory for this");
    return kFailed;
  } catch (const std::exception& error) {
    note(reason(error));
    return kFailed;
  }
}
