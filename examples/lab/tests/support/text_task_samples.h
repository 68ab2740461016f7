// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What the text tasks give for seed 7, read and compared with RULER's templates by hand: small samples, and hashes of
/// longer ones.

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>

namespace kvkeep::lm {

struct SmallSample {
  std::string_view name;
  std::int64_t length;       ///< in words
  std::string_view prompt;   ///< context|question|answer prefix|
  std::string_view answers;  ///< a blank between them
};

inline constexpr std::array<SmallSample, 14> kSmallSamples{{
    {"ruler/niah-single-1", 230,
     "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
     "number afterwards.\n"
     "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
     "One of the special magic numbers for clever-triangle is: 7588897.\n"
     "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
     "|What is the special magic number for clever-triangle mentioned in the provided text?| The special magic number "
     "for clever-triangle "
     "mentioned in the provided text is|",
     "7588897"},
    {"ruler/niah-single-2", 230,
     "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
     "number afterwards.\n"
     "Call me Ishmael. Some years ago - never mind how long precisely - having little or no money in my purse, I "
     "thought I would "
     "sail about a little! One of the special magic numbers for entire-journal is: 9642738. It is a way I have of "
     "\"driving off "
     "the spleen.\" Whenever it is damp,\n"
     "|What is the special magic number for entire-journal mentioned in the provided text?| The special magic number "
     "for entire-journal "
     "mentioned in the provided text is|",
     "9642738"},
    {"ruler/niah-single-3", 230,
     "A special magic uuid is hidden within the following text. Make sure to memorize it. I will quiz you about the "
     "uuid afterwards.\n"
     "Call me Ishmael. One of the special magic uuids for chilly-pitcher is: d716fe80-24f1-44f2-b53e-b89d32601efc. "
     "Some years ago "
     "- never mind how long precisely - having little or no money in my purse, I thought I would sail about a little! "
     "It is a way "
     "I have of \"driving off the spleen.\" Whenever it is damp,\n"
     "|What is the special magic uuid for chilly-pitcher mentioned in the provided text?| The special magic uuid for "
     "chilly-pitcher "
     "mentioned in the provided text is|",
     "d716fe80-24f1-44f2-b53e-b89d32601efc"},
    {"ruler/niah-multikey-1", 230,
     "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
     "number afterwards.\n"
     "One of the special magic numbers for stiff-garden is: 8856552. One of the special magic numbers for wild-flute "
     "is: 5833126. "
     "One of the special magic numbers for happy-kayak is: 1889790. Call me Ishmael. One of the special magic numbers "
     "for shiny-mirror "
     "is: 7928333. Some years ago - never mind how long precisely - having\n"
     "|What is the special magic number for shiny-mirror mentioned in the provided text?| The special magic number for "
     "shiny-mirror "
     "mentioned in the provided text is|",
     "7928333"},
    {"ruler/niah-multikey-2", 230,
     "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
     "number afterwards.\n"
     "One of the special magic numbers for narrow-bureau is: 3091672.\n"
     "One of the special magic numbers for grateful-chalk is: 7248220.\n"
     "One of the special magic numbers for strict-deer is: 9428880.\n"
     "One of the special magic numbers for fragile-month is: 8943760.\n"
     "One of the special magic numbers for distant-parcel is: 2968315.\n"
     "|What is the special magic number for narrow-bureau mentioned in the provided text?| The special magic number "
     "for narrow-bureau "
     "mentioned in the provided text is|",
     "3091672"},
    {"ruler/niah-multikey-3", 230,
     "A special magic uuid is hidden within the following text. Make sure to memorize it. I will quiz you about the "
     "uuid afterwards.\n"
     "One of the special magic uuids for 602ea62c-f9dc-4c5a-a0ed-6058fa97a9d5 is: "
     "fc32cc7d-61e0-406d-a000-bd6d942aade6.\n"
     "One of the special magic uuids for 50a0228b-1c4e-4b63-9a4d-78a9860e7ce8 is: "
     "2f109964-6c2a-4d84-a0b5-2d83f1f723ef.\n"
     "One of the special magic uuids for b1a7a825-f0bf-4a2c-8abe-0b9881686a04 is: "
     "d544941a-f6aa-43ea-80d0-c6d5e1443934.\n"
     "One of the special magic uuids for 6aff949e-7ab1-404f-b108-514ead862051 is: "
     "02265e27-714b-4f66-bdd0-3a11124b12a9.\n"
     "One of the special magic uuids for 82f3bea7-4d1a-4847-bca2-a1bf288abef0 is: "
     "b43d5693-8453-4b30-b8cd-452513cecb5a.\n"
     "|What is the special magic uuid for 6aff949e-7ab1-404f-b108-514ead862051 mentioned in the provided text?| The "
     "special magic "
     "uuid for 6aff949e-7ab1-404f-b108-514ead862051 mentioned in the provided text is|",
     "02265e27-714b-4f66-bdd0-3a11124b12a9"},
    {"ruler/niah-multivalue", 230,
     "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about "
     "the numbers "
     "afterwards.\n"
     "One of the special magic numbers for likely-notebook is: 6504043. One of the special magic numbers for "
     "likely-notebook is: "
     "8774098. One of the special magic numbers for likely-notebook is: 2887649. Call me Ishmael. One of the special "
     "magic numbers "
     "for likely-notebook is: 2688505. Some years ago - never mind how long precisely -\n"
     "|What are all the special magic numbers for likely-notebook mentioned in the provided text?| The special magic "
     "numbers for "
     "likely-notebook mentioned in the provided text are|",
     "8774098 2688505 2887649 6504043"},
    {"ruler/niah-multiquery", 230,
     "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about "
     "the numbers "
     "afterwards.\n"
     "One of the special magic numbers for white-flame is: 1232128. One of the special magic numbers for ready-highway "
     "is: 9886724. "
     "One of the special magic numbers for serious-bubble is: 2975442. Call me Ishmael. One of the special magic "
     "numbers for safe-ginger "
     "is: 8099128. Some years\n"
     "|What are all the special magic numbers for serious-bubble, white-flame, safe-ginger, and ready-highway "
     "mentioned in the "
     "provided text?| The special magic numbers for serious-bubble, white-flame, safe-ginger, and ready-highway "
     "mentioned in the "
     "provided text are|",
     "2975442 1232128 8099128 9886724"},
    {"ruler/vt", 369,
     "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"
     "\n"
     "VAR NZS = 21224\n"
     "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
     "VAR EDE = VAR NZS \n"
     "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
     "VAR YXK = VAR EDE \n"
     "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
     "VAR HIA = VAR YXK \n"
     "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
     "VAR XAH = VAR HIA \n"
     "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
     "Question: Find all variables that are assigned the value 21224 in the text above. Answer: According to the "
     "chain(s) of variable "
     "assignment in the text above, 5 variables are assigned the value 21224, they are:  NZS EDE YXK HIA XAH\n"
     "\n"
     "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"
     "\n"
     "VAR TWCAN = 80674\n"
     "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
     "VAR EOWMJ = VAR TWCAN \n"
     "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
     "VAR KVQWT = VAR EOWMJ \n"
     "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
     "VAR GPFFF = VAR KVQWT \n"
     "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
     "VAR XFXUY = VAR GPFFF \n"
     "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
     "|Question: Find all variables that are assigned the value 80674 in the text above.| Answer: According to the "
     "chain(s) of "
     "variable assignment in the text above, 5 variables are assigned the value 80674, they are: |",
     "TWCAN EOWMJ KVQWT GPFFF XFXUY"},
    {"ruler/cwe", 438,
     "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
     "appear most "
     "often.\n"
     "1. distant 2. triangle 3. borrow 4. river 5. foam 6. sparrow 7. gather 8. pine 9. echo 10. pine 11. distant 12. "
     "chop 13. "
     "orchard 14. beaver 15. knit 16. orchard 17. knit 18. echo 19. choose 20. echo 21. boat 22. borrow 23. soap 24. "
     "pull 25. gather "
     "26. gather 27. distant 28. careful 29. triangle 30. orchard 31. river 32. sneeze 33. sneeze 34. sneeze 35. "
     "borrow 36. pine "
     "37. knit 38. shield 39. triangle 40. river\n"
     "Question: What are the 10 most common words in the above list? Answer: The top 10 words that appear most often "
     "in the list "
     "are: 1. pine 2. borrow 3. river 4. orchard 5. echo 6. sneeze 7. distant 8. knit 9. triangle 10. gather\n"
     "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
     "appear most "
     "often.\n"
     "1. suit 2. worry 3. harbor 4. yacht 5. cinema 6. sword 7. yacht 8. harbor 9. sword 10. suit 11. journal 12. "
     "branch 13. doctor "
     "14. suit 15. harbor 16. worry 17. doctor 18. harbor 19. cinema 20. sword 21. yacht 22. cinema 23. branch 24. "
     "worry 25. doctor "
     "26. plead 27. doctor 28. branch 29. earth 30. suit 31. worry 32. plead 33. suit 34. suit 35. cinema 36. yacht "
     "37. doctor "
     "38. journal 39. journal 40. plead 41. journal 42. branch 43. plead 44. harbor 45. journal 46. plead 47. yacht "
     "48. worry 49. "
     "plead 50. journal 51. worry 52. cinema 53. sword 54. cinema 55. branch 56. sword 57. sword 58. harbor 59. doctor "
     "60. branch "
     "61. yacht\n"
     "|Question: What are the 10 most common words in the above list?| Answer: The top 10 words that appear most often "
     "in the list "
     "are:|",
     "doctor worry plead branch suit harbor yacht cinema journal sword"},
    {"ruler/fwe", 230,
     "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
     "appeared coded words. "
     "... xgbvtx ... ... ujaova ujaova oykedt ... kjmyqf ... ... ... ... ... ... ... xgbvtx ujaova ... ... ... ... ... "
     "... ... "
     "... ujaova ujaova ... ... ... ... ... ohgjxf xgbvtx ujaova oxluzw ... ... ujaova ujaova ... ... ... ... xgbvtx "
     "... ujaova "
     "... ... ... ... ... ... rfzvrp ... ujaova ... ... ... ... ... ... ... ujaova xgbvtx ... ujaova oxluzw ... ... "
     "... ... ... "
     "... ... ... ... ... ... ohgjxf ... ... kjmyqf ujaova ujaova ... xgbvtx xgbvtx ohgjxf ... ... ... ujaova ... "
     "xgbvtx ... ... "
     "... ujaova ... ... ... ujaova ... oxluzw ... ... ... ... ... ujaova ujaova ujaova ... ... ohgjxf ohgjxf ... ...\n"
     "|Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
     "appeared words "
     "in the above coded text?| Answer: According to the coded text above, the three most frequently appeared words "
     "are:|",
     "ujaova xgbvtx ohgjxf"},
    {"ruler/qa-1", 150,
     "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n"
     "\n"
     "The following are given documents.\n"
     "\n"
     "Document 1:\n"
     "Town 9 lies on the river 9x and has a bridge, a mill and a market that opens early.\n"
     "\n"
     "Document 2:\n"
     "Town 8 lies on the river 8x and has a bridge, a mill and a market that opens early.\n"
     "\n"
     "Document 3:\n"
     "Town 7 lies on the river 7x and has a bridge, a mill and a market that opens early.\n"
     "\n"
     "|Answer the question based on the given documents. Only give me the answer and do not output any other words.\n"
     "\n"
     "Question: Where does town 7 lie?| Answer:|",
     "on the river 7x river 7x"},
    {"ruler/qa-2", 320,
     "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n"
     "\n"
     "The following are given documents.\n"
     "\n"
     "Document 1:\n"
     "Town 16 lies on the river 16x and has a bridge, a mill and a market that opens early.\n"
     "\n"
     "Document 2:\n"
     "Town 7 lies on the river 7x and has a bridge, a mill and a market that opens early.\n"
     "\n"
     "Document 3:\n"
     "Town 14 lies on the river 14x and has a bridge, a mill and a market that opens early.\n"
     "\n"
     "Document 4:\n"
     "Town 9 lies on the river 9x and has a bridge, a mill and a market that opens early.\n"
     "\n"
     "Document 5:\n"
     "Town 12 lies on the river 12x and has a bridge, a mill and a market that opens early.\n"
     "\n"
     "Document 6:\n"
     "Town 13 lies on the river 13x and has a bridge, a mill and a market that opens early.\n"
     "\n"
     "Document 7:\n"
     "Town 10 lies on the river 10x and has a bridge, a mill and a market that opens early.\n"
     "\n"
     "Document 8:\n"
     "Town 15 lies on the river 15x and has a bridge, a mill and a market that opens early.\n"
     "\n"
     "Document 9:\n"
     "Town 11 lies on the river 11x and has a bridge, a mill and a market that opens early.\n"
     "\n"
     "Document 10:\n"
     "Town 8 lies on the river 8x and has a bridge, a mill and a market that opens early.\n"
     "\n"
     "Document 11:\n"
     "Town 1141 lies on the river 1141x and has a bridge, a mill and a market that opens early.\n"
     "\n"
     "|Answer the question based on the given documents. Only give me the answer and do not output any other words.\n"
     "\n"
     "Question: Where does town 7 lie?| Answer:|",
     "on the river 7x river 7x"},
    {"text/needle", 70,
     "The special magic number for cushion is: 75011. Call me Ishmael. Some years ago - never mind how long precisely "
     "- having "
     "little or no money in my purse, I thought I would sail about\n"
     "|What is the special magic number for cushion mentioned in the text?| The special magic number for cushion is:|",
     "75011"},
}};

/// Of seed 7 at a length of 4096 pieces.
inline constexpr std::array<std::pair<std::string_view, std::uint64_t>, 14> kHashes{{
    {"ruler/niah-single-1", 611079666669861191ULL},
    {"ruler/niah-single-2", 1741179698448523746ULL},
    {"ruler/niah-single-3", 12331520958578851198ULL},
    {"ruler/niah-multikey-1", 17679351753905814723ULL},
    {"ruler/niah-multikey-2", 9623468705098594881ULL},
    {"ruler/niah-multikey-3", 7553696663526582740ULL},
    {"ruler/niah-multivalue", 8510344750250093094ULL},
    {"ruler/niah-multiquery", 8636537221596879018ULL},
    {"ruler/vt", 7109254615874340238ULL},
    {"ruler/cwe", 17195721946588107770ULL},
    {"ruler/fwe", 6053908172492951198ULL},
    {"ruler/qa-1", 6340780191930593848ULL},
    {"ruler/qa-2", 14586640062096450863ULL},
    {"text/needle", 6455968908615810064ULL},
}};

}  // namespace kvkeep::lm
