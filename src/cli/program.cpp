// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/cli/program.h"

#include <fcntl.h>
#include <unistd.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "help.h"
#include "kvkeep/cli/options.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/run_files.h"
#include "kvkeep/version.h"

namespace kvkeep::cli {
namespace {

constexpr int kRefused = 2, kFailed = 1, kSignalled = 128;

constexpr const char* kHowToGetThem =
    "this kvkeep was built without the laboratory, which needs LibTorch; build kvkeep from its sources with LibTorch "
    "(examples/lab/README.md)";

void stop_with(int signal, std::string_view line) {
  if (io::leaves_core(signal)) return;
  static_cast<void>(!::write(STDERR_FILENO, line.data(), line.size()));
  ::_exit(kSignalled + signal);
}
extern "C" void stop(int signal) { stop_with(signal, "\nkvkeep: stopped\n"); }
extern "C" void stop_writing(int signal) { stop_with(signal, "\nkvkeep: stopped; no half-written file is left\n"); }

// If a standard stream is closed, the next file that is opened would get its number and receive what is printed.
// /dev/null takes its place, opened in the wrong direction: using it fails, as it does for a closed stream.
void occupy_closed_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(stream, F_GETFD) < 0)
      static_cast<void>(
          ::open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY));  // gets the lowest free number
}

// In our words where CLI11 has "--plugin: 1 required FILE missing".
std::string said_of(const CLI::ParseError& error) {
  const std::string said = error.what();
  const std::size_t name = said.find(": 1 required ");
  if (name == std::string::npos) return said;
  return text(said.substr(0, name), " has no value; allowed one after it");
}

std::string no_option(const CLI::App& command, const std::string& given, const std::string& full) {
  const std::string option = given.substr(0, given.find('='));
  const bool version = command.get_parent() == nullptr && (option == "-v" || option == "-V");
  return text("there is no option '", shortened(option), "'",
              version ? " (did you mean \"--version\"?)" : did_you_mean(option, option_names_of(command)), "; see ",
              full, " --help");
}

// CLI11 never ends on an empty word that no option takes: it is the name of option groups, which have none.
void refuse_empty_words(const CLI::App& app, std::span<char* const> words) {
  const CLI::App* command = &app;
  std::string full = app.get_name(), unknown;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string word = words[i];
    if (word.empty()) {
      if (!unknown.empty()) refuse(no_option(*command, unknown, full));
      refuse("word ", i + 1, " after ", app.get_name(), " is empty",
             i > 0 ? text(" (behind '", words[i - 1], "')") : "",
             "; allowed an empty word as the value of an option only; see ", full, " --help");
    }
    if (word == "--" || !word.starts_with('-')) {
      const CLI::App* const below = command == &app ? subcommand(app, word) : nullptr;
      if (below == nullptr) continue;
      if (below->get_prefix_command()) return;  // says itself that it cannot run
      command = below;
      full += " " + word;
      continue;
    }
    const bool is_long = word.starts_with("--");
    const std::string name = is_long ? word.substr(0, word.find('=')) : word.substr(0, 2);
    const CLI::Option* const option = command->get_option_no_throw(name);
    if (option == nullptr && unknown.empty()) unknown = word;
    if (option != nullptr && is_long && word == name + "=" && option->get_items_expected_min() > 0)
      refuse(name, " has no value behind its =; allowed one");  // CLI11 would take the next word
    if (option != nullptr && word == name) i += static_cast<std::size_t>(std::max(0, option->get_items_expected_min()));
  }
}

// "--policy and one of --model, --shape", of what the command needs and was not given.
std::string missing_of(const CLI::App& command) {
  std::string all;
  const auto add = [&](const std::string& one) { all += (all.empty() ? "" : " and ") + one; };
  for (const CLI::Option* option : command.get_options())
    if (option->get_required() && option->count() == 0) add(option->get_name());
  for (const CLI::App* group : command.get_subcommands([](const CLI::App* c) { return c->get_name().empty(); }))
    if (group->get_require_option_min() == 1 && group->count_all() == 0)
      add("one of " + joined(choices_of(*group), [](const CLI::Option* o) { return o->get_name(); }));
  return all;
}

// What is unknown is named before what may be missing because of it.
int refuse_usage(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* where = &app;
  while (!where->get_subcommands().empty()) where = where->get_subcommands().front();
  std::string full = where->get_name();
  for (const CLI::App* parent = where->get_parent(); parent != nullptr; parent = parent->get_parent())
    full = parent->get_name() + " " + full;
  const std::vector<std::string> rest = app.remaining(true);
  const auto unknown = std::ranges::find_if(rest, [](const std::string& word) { return word.starts_with("-"); });
  if (where == &app && !rest.empty() && unknown != rest.begin()) {
    note(no_subcommand(app, rest.front()));
  } else if (unknown != rest.end()) {
    note(no_option(*where, *unknown, full));
  } else {
    const std::string missing = error.get_name() == "RequiredError" ? missing_of(*where) : "";
    const bool several = missing.find(" and ") != std::string::npos;
    note(text(missing.empty() ? said_of(error) : missing + (several ? " are required" : " is required"), "; see ", full,
              " --help"));
  }
  return kRefused;
}

int run_once(const Program& program, int argc, char** argv) {
  CLI::App app("Decides which entries of a language model's key-value cache stay, and moves them.", "kvkeep");
  app.set_version_flag("--version", std::string("kvkeep ") + kVersion, "print the version");
  app.require_subcommand(1);
  app.footer(text(program.examples(), "\n", kStreams, "\nExit status: ", kExitStatus, "\n"));
  app.formatter(help_formatter());
  std::vector<Run> runs = program.add_commands(app);
  const Run load_plugins = add_plugins(app);
  runs.push_back(add_help(app));
  require_decimal_integers(app);
  require_marked_files(app);
  if (argc <= 1) {
    std::fputs(app.help().c_str(), stderr);
    return kRefused;
  }
  if (argv[1] == std::string_view("__complete")) {
    load_plugins();
    print(completions(app, {argv + 2, argv + argc}));
    return 0;
  }
  refuse_empty_words(app, {argv + 1, argv + argc});
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
      program.prepare(*commands[i], argv);
      // Only now: a restart would lose it.
      io::leave_no_unfinished_files(writes_files(*commands[i]) ? stop_writing : stop);
      load_plugins();  // their policies may name files
      check_files(*commands[i]);
      runs[i]();
    }
  return 0;
}

}  // namespace

std::vector<Run> Program::add_commands(CLI::App& app) const {
  std::vector<Run> runs{add_policies(app), add_plan(app), add_replay(app, *this), add_doctor(app, *this)};
  for (const char* name : {"generate", "chat", "tokens", "eval", "perplexity", "fidelity", "record", "calibrate"}) {
    app.add_subcommand(name, text(name, ": ", kHowToGetThem))->prefix_command()->group("")->footer("");
    runs.emplace_back([name] { refuse<Unsupported>(name, ": ", kHowToGetThem); });
  }
  return runs;
}

std::string Program::examples() const {
  return R"(
Built without the laboratory: generate, chat, tokens, eval, perplexity, fidelity, record and calibrate run a model and
need LibTorch. To have them, build kvkeep from its sources with LibTorch (examples/lab/README.md).

Examples:
  kvkeep policies                                           the policies to choose from
  kvkeep policies ams-tova                                  its options with defaults and ranges
  kvkeep plan --shape qwen7b --policy ams-tova,budget=1024 --batch 16 --length 32768
  kvkeep replay event.safetensors --policy ams-tova,budget=96,interval=32 --out kept.safetensors
)";
}

void Program::set_threads(int threads) const {
  const auto processors = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  using_.reset();
  pool_.emplace(threads > 0 ? std::min(threads, 16 * processors) : processors);
  using_.emplace(pool_->threads());
}

trace::Result Program::replay(const std::string& kind, const io::SafetensorsFile& file, const std::filesystem::path&,
                              std::unique_ptr<KVPolicy>) const {
  refuse<Unsupported>(file.where(), ": a trace of kind \"", kind, "\" needs the laboratory; ", kHowToGetThem,
                      "; allowed event and prefill");
}

std::vector<Finding> Program::findings() const {
  return {{"LibTorch", "not in this build: it runs no model"}, {"CUDA", "not in this build"}};
}

int run(const Program& program, int argc, char** argv) {
  occupy_closed_streams();
  for (const int signal : {SIGPIPE, SIGXFSZ}) std::signal(signal, SIG_IGN);  // the write fails instead, with a message
  try {
    return run_once(program, argc, argv);
  } catch (const InvalidArgument& error) {
    note(error.what());
    return kRefused;
  } catch (const Unsupported& error) {
    note(error.what());
    return kRefused;
  } catch (const NobodyReads&) {
    return kSignalled + SIGPIPE;  // what SIGPIPE would have ended, with its half-written files
  } catch (const std::bad_alloc&) {
    note("there is not enough memory for this");
    return kFailed;
  } catch (const std::exception& error) {
    note(program.reason(error));
    return kFailed;
  } catch (...) {
    note("an exception that is no std::exception, perhaps of a plug-in");
    return kFailed;
  }
}

}  // namespace kvkeep::cli
