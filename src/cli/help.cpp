// SPDX-License-Identifier: Apache-2.0
#include "help.h"

#include <unistd.h>
#include <CLI/Formatter.hpp>
#include <CLI/Option.hpp>

#include <algorithm>
#include <cctype>
#include <memory>
#include <string_view>

#include "kvkeep/cli/options.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/run_files.h"
#include "kvkeep/version.h"

namespace kvkeep::cli {
namespace {

// Those of groups, too.
std::vector<const CLI::Option*> each_option_of(const CLI::App& app) {
  std::vector<const CLI::Option*> all = app.get_options();
  for (const CLI::App* group : app.get_subcommands([](const CLI::App* c) { return c->get_name().empty(); }))
    append(all, each_option_of(*group));
  return all;
}

// As it is, where roff would read a command or print a typographic character.
std::string roff(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '.' && (out.empty() || out.back() == '\n')) out += "\\&";
    switch (c) {
      case '\\':
        out += "\\(rs";
        break;
      case '\'':
        out += "\\(aq";
        break;
      case '`':
        out += "\\(ga";
        break;
      case '^':
        out += "\\(ha";
        break;
      case '~':
        out += "\\(ti";
        break;
      case '-':
        out += "\\-";
        break;
      default:
        out += c;
    }
  }
  return out;
}

class Help final : public CLI::Formatter {
 public:
  Help() {
    const std::size_t columns = io::terminal_width(STDOUT_FILENO);
    most_ = columns < kNarrowest ? 0 : columns;
    column_width(most_ == 0 ? kNames : std::min(kNames, 2 * most_ / 5));
  }

  std::string make_option(const CLI::Option* option, bool positional) const override {
    return entry(make_option_name(option, positional) + make_option_opts(option), make_option_desc(option));
  }
  std::string make_subcommand(const CLI::App* command) const override {
    return entry(command->get_display_name(true), command->get_description());
  }
  std::string make_subcommands(const CLI::App* app, CLI::AppFormatMode mode) const override {
    std::string out;
    for (const CLI::App* group : app->get_subcommands([](const CLI::App* c) { return c->get_name().empty(); })) {
      std::string name = group->get_group();
      name.front() = static_cast<char>(std::toupper(static_cast<unsigned char>(name.front())));
      out +=
          make_group(name + (group->get_require_option_min() == 1 ? ", exactly one" : ""), false, choices_of(*group));
    }
    return out.empty() ? CLI::Formatter::make_subcommands(app, mode) : out;  // no command here has both
  }

 private:
  static constexpr std::size_t kNames = 42, kNarrowest = 40;

  // A name, and what it does in a column beside it.
  [[nodiscard]] std::string entry(const std::string& names, const std::string& said) const {
    const std::size_t column = get_column_width();
    std::string out = "  " + names;
    const std::string indent = "\n" + std::string(column, ' ');
    out += out.size() < column ? std::string(column - out.size(), ' ') : indent;
    std::size_t used = column;
    for (const std::string& word : split(said, ' ')) {
      if (used > column && most_ > 0 && used + 1 + word.size() > most_) {
        out += indent;
        used = column;
      }
      if (used > column) out += ' ', ++used;
      out += word;
      used += word.size();
    }
    return out + "\n";
  }

  std::size_t most_;  // characters of a line; 0: any
};

std::string manual_of(const CLI::App& app) {
  std::string out;
  for (const CLI::Option* option : each_option_of(app))
    out += text(".TP\n\\fB", roff(option->get_name(true, true)), "\\fR ", roff(option->get_option_text()), "\n",
                roff(option->get_description()), "\n");
  return out;
}

std::string as_it_is(std::string_view lines) { return text(".PP\n.nf\n", roff(lines), "\n.fi\n"); }

// A manual page, in roff.
std::string manual(const CLI::App& app) {
  // What the main help ends with, without its examples: sub-commands have their own.
  const std::string end = app.get_footer();
  const std::size_t examples = std::min(end.find("Examples:\n"), end.size());
  std::string out =
      text(".TH KVKEEP 1 \"\" \"kvkeep ", kVersion, "\" \"User Commands\"\n.SH NAME\nkvkeep \\- ",
           roff(app.get_description()), "\n.SH SYNOPSIS\n\\fBkvkeep\\fR SUBCOMMAND [OPTIONS]\n.SH DESCRIPTION\n",
           roff(app.get_description()), "\n.PP\n", roff(kStreams), "\n", as_it_is(end.substr(0, examples)));
  for (const std::string& name : subcommands_of(app)) {
    const CLI::App* const command = subcommand(app, name);
    out += text(".SH kvkeep ", name, "\n", roff(command->get_description()), "\n", manual_of(*command),
                command->get_footer() == end ? "" : as_it_is(command->get_footer()));
  }
  return text(out, ".SH OPTIONS WITHOUT A SUBCOMMAND\n", manual_of(app), ".SH EXIT STATUS\n", roff(kExitStatus), "\n");
}

struct HelpOptions {
  std::string command;
  bool man = false;
};

void run(const CLI::App& app, const HelpOptions& o) {
  if (o.man) return print(manual(app));
  // Not app.help(), which is about the sub-command that was chosen: this one.
  if (o.command.empty()) return print(app.get_formatter()->make_help(&app, app.get_name(), CLI::AppFormatMode::Normal));
  const CLI::App* const command = subcommand(app, o.command);
  KVKEEP_REQUIRE(command != nullptr, no_subcommand(app, o.command));
  print(command->help(app.get_name()));
}

}  // namespace

const CLI::App* subcommand(const CLI::App& app, const std::string& name) {
  const auto found = app.get_subcommands([&](const CLI::App* c) { return c->get_name() == name; });
  return found.empty() || name.empty() ? nullptr : found.front();
}

std::vector<std::string> subcommands_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App* c) { return !c->get_group().empty(); }))
    names.push_back(command->get_name());
  return names;
}

std::vector<std::string> option_names_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : each_option_of(app))
    if (!option->get_positional()) names.push_back(option->get_name());
  return names;
}

std::vector<const CLI::Option*> choices_of(const CLI::App& group) {
  return group.get_options([&](const CLI::Option* o) { return o != group.get_help_ptr(); });
}

std::shared_ptr<CLI::FormatterBase> help_formatter() { return std::make_shared<Help>(); }

std::string no_subcommand(const CLI::App& app, const std::string& given) {
  const std::vector<std::string> names = subcommands_of(app);
  const std::string nearest = given == "version" ? " (did you mean \"--version\"?)" : did_you_mean(given, names);
  return text("there is no sub-command '", shortened(given), "'", nearest, "; allowed ", joined(names));
}

Run add_help(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("help", "what --help says of a sub-command, or the whole manual");
  auto o = std::make_shared<HelpOptions>();
  as_names(sub->add_option("command", o->command, "a sub-command"), subcommands_of(app))->option_text("COMMAND");
  sub->add_flag("--man", o->man, "everything as a manual page, in roff: kvkeep help --man | man -l -");
  return [&app, o] { run(app, *o); };
}

std::string completions(const CLI::App& app, const std::vector<std::string>& given_words) {
  // Bash takes words apart at every =, and replaces what is behind the last one.
  std::vector<std::string> words;
  std::size_t typed = 0;  // of the last word: what bash keeps
  for (std::size_t i = 0; i < given_words.size(); ++i) {
    typed = 0;
    if (given_words[i] != "=" || words.empty()) {
      words.push_back(given_words[i]);
      continue;
    }
    words.back() += "=";
    typed = words.back().size();
    if (i + 1 < given_words.size()) words.back() += given_words[++i];
  }
  const auto from_last = [&](std::size_t n) { return n < words.size() ? words[words.size() - 1 - n] : std::string(); };
  const CLI::App* about = nullptr;
  for (std::size_t i = 0; i + 1 < words.size() && about == nullptr; ++i) about = subcommand(app, words[i]);
  if (about == nullptr) about = &app;

  std::string begun = from_last(0), option = from_last(1), lead;
  if (const std::size_t equals = begun.find('='); begun.starts_with("--") && equals != std::string::npos) {
    option = begun.substr(0, equals);
    lead = begun.substr(0, equals + 1);
    begun.erase(0, equals + 1);
  }
  const CLI::Option* const given = option.starts_with("-") ? about->get_option_no_throw(option) : nullptr;
  std::vector<std::string> found;
  if (given != nullptr && given->get_items_expected_max() > 0)
    found = values_of(*given, begun);
  else if (begun.starts_with("-"))
    found = option_names_of(*about);
  else if (about == &app)
    found = subcommands_of(app);
  else
    for (const CLI::Option* place : about->get_options([](const CLI::Option* o) { return o->get_positional(); }))
      append(found, values_of(*place, begun));
  std::string out;
  for (const std::string& one : found)
    if (one.starts_with(begun)) out += (lead + one).substr(std::min(typed, lead.size() + one.size())) + "\n";
  return out;
}

}  // namespace kvkeep::cli
