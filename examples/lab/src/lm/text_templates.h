// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The words of the text tasks. A {name} is filled in.

#include <string_view>

namespace kvkeep::lm {

// RULER's, byte for byte: scripts/data/synthetic/constants.py, cut where the question begins and where the answer does.

inline constexpr std::string_view kNoise =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

inline constexpr std::string_view kNeedle = "One of the special magic {kind} for {key} is: {value}.";
inline constexpr std::string_view kNiahText =
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n";
inline constexpr std::string_view kNiahQuestion =
    "What are all the special magic {kind} for {query} mentioned in the provided text?";
inline constexpr std::string_view kNiahAnswer =
    " The special magic {kind} for {query} mentioned in the provided text are";

// If one value is asked for, RULER replaces Some by A, "are all" by is, are by is, and takes the singular of what it
// asks for.
inline constexpr std::string_view kNiahOneText =
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n";
inline constexpr std::string_view kNiahOneQuestion =
    "What is the special magic {kind} for {query} mentioned in the provided text?";
inline constexpr std::string_view kNiahOneAnswer =
    " The special magic {kind} for {query} mentioned in the provided text is";

inline constexpr std::string_view kVtText =
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n";
inline constexpr std::string_view kVtQuestion =
    "Question: Find all variables that are assigned the value {query} in the text above.";
inline constexpr std::string_view kVtAnswer =
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{count} variables are assigned the value {query}, they are: ";

inline constexpr std::string_view kCweText =
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n";
inline constexpr std::string_view kCweQuestion = "Question: What are the 10 most common words in the above list?";
inline constexpr std::string_view kCweAnswer = " Answer: The top 10 words that appear most often in the list are:";

inline constexpr std::string_view kFweText =
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. ";
inline constexpr std::string_view kFweQuestion =
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?";
inline constexpr std::string_view kFweAnswer =
    " Answer: According to the coded text above, the three most frequently appeared words are:";

// {documents} are each kQaDocument, one empty line apart.
inline constexpr std::string_view kQaText =
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{documents}\n\n";
inline constexpr std::string_view kQaDocument = "Document {number}:\n{document}";
inline constexpr std::string_view kQaQuestion =
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "Question: {query}";
inline constexpr std::string_view kQaAnswer = " Answer:";

// Our own, for text/needle.

inline constexpr std::string_view kProseNeedle = "The special magic number for {key} is: {value}.";
inline constexpr std::string_view kProseQuestion =
    "What is the special magic number for {query} mentioned in the text?";
inline constexpr std::string_view kProseAnswer = " The special magic number for {query} is:";

}  // namespace kvkeep::lm
