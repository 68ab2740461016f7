// kvkeep: the command.

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <new>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "commands.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/version.h"
#include "options.h"
#include "progress.h"
#include "table.h"

namespace kvkeep::cli {
namespace {

constexpr const char* kSubcommands =
    "generate, tokens, eval, perplexity, fidelity, replay, record, calibrate, plan, policies, doctor";
constexpr int kRefused = 2, kFailed = 1, kSignalled = 128;

constexpr const char* kMainExamples = R"(
Examples:
  kvkeep policies                                           the policies to choose from
  kvkeep generate --model SmolLM2.gguf --chat --prompt "Why is the sky blue?" --policy tova,budget=256
  kvkeep eval --model examples/model --task ask --budgets 128,64
  kvkeep perplexity --model SmolLM2.gguf --text prose.txt --budgets 256 --policy tova --policy snapkv
  kvkeep generate --model examples/model --task chain --seed 7 --policy ams-tova,budget=96,interval=32 \
      --max-new-tokens 200
  kvkeep record --model examples/model --ids-file prompt.txt --policy tova,budget=96,interval=32 \
      --out event.safetensors
  kvkeep plan --shape qwen7b --policy ams-tova,budget=1024 --batch 16 --length 32768
  kvkeep replay event.safetensors --policy ams-tova,budget=96,interval=32 --out kept.safetensors

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

/// LibTorch's OpenMP threads spin for milliseconds while they wait. On a core that other processes want too, this holds
/// up the very threads they wait for. The runtime reads the length of the spin once, before main(). So commands that
/// run a model, and doctor, which reports how threads wait, restart with a short spin unless the user has set one.
void spin_briefly(const CLI::App& command, char** argv) {
  constexpr std::array<std::string_view, 7> kComputing = {"generate", "eval",      "perplexity", "fidelity",
                                                          "record",   "calibrate", "doctor"};
  if (std::ranges::find(kComputing, command.get_name()) == kComputing.end()) return;
  if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
  std::error_code none;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", none);
  if (!none && ::setenv("GOMP_SPINCOUNT", "1000", 1) == 0)
    ::execv(self.c_str(), argv);  // if this fails, the command continues as it is
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
  app.footer(kMainExamples);
  app.get_formatter()->column_width(42);
  const std::vector<Run> runs{add_generate(app), add_tokens(app),   add_eval(app),   add_perplexity(app),
                              add_fidelity(app), add_replay(app),   add_record(app), add_calibrate(app),
                              add_plan(app),     add_policies(app), add_doctor(app)};
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
      spin_briefly(*commands[i], argv);
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
  } catch (const c10::Error& error) {
    const std::string why = error.what_without_backtrace();
    note(kvkeep::text("LibTorch: ", why.substr(0, why.find('\n'))));
    return kFailed;
  } catch (const std::exception& error) {
    note(error.what());
    return kFailed;
  }
}
