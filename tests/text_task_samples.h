#pragma once
/// What the text tasks give for seed 7, read and compared with RULER's templates by hand: small samples, and hashes of longer ones.

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

inline constexpr std::array<SmallSample, 12> kSmallSamples{{
    {"ruler/niah-single-1", 230,
     "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the number afterwards.\n"
     "One of the special magic numbers for dizzy-diary is: 4828443.\n"
     "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
     "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
     "|What is the special magic number for dizzy-diary mentioned in the provided text?| The special magic number for dizzy-diary "
     "mentioned in the provided text is|",
     "4828443"},
    {"ruler/niah-single-2", 230,
     "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the number afterwards.\n"
     "Call me Ishmael. Some years ago - never mind how long precisely - having little or no money in my purse, I thought I would "
     "sail about a little! It is a way I have of \"driving off the spleen.\" One of the special magic numbers for graceful-pencil "
     "is: 7991180. Whenever it is damp,\n"
     "|What is the special magic number for graceful-pencil mentioned in the provided text?| The special magic number for graceful-pencil "
     "mentioned in the provided text is|",
     "7991180"},
    {"ruler/niah-single-3", 230,
     "A special magic uuid is hidden within the following text. Make sure to memorize it. I will quiz you about the uuid afterwards.\n"
     "Call me Ishmael. Some years ago - never mind how long precisely - having little or no money in my purse, I thought I would "
     "sail about a little! It is a way I have of \"driving off the spleen.\" One of the special magic uuids for cheerful-parade "
     "is: d4fae274-c980-4bf0-a615-4ade071c163e. Whenever it is damp,\n"
     "|What is the special magic uuid for cheerful-parade mentioned in the provided text?| The special magic uuid for cheerful-parade "
     "mentioned in the provided text is|",
     "d4fae274-c980-4bf0-a615-4ade071c163e"},
    {"ruler/niah-multikey-1", 230,
     "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the number afterwards.\n"
     "One of the special magic numbers for shiny-bubble is: 1724329. One of the special magic numbers for rough-berry is: 1133541. "
     "One of the special magic numbers for lasting-chimney is: 1946921. One of the special magic numbers for simple-laundry is: "
     "9082284. Call me Ishmael. Some years ago - never mind how long precisely - having\n"
     "|What is the special magic number for rough-berry mentioned in the provided text?| The special magic number for rough-berry "
     "mentioned in the provided text is|",
     "1133541"},
    {"ruler/niah-multikey-2", 230,
     "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the number afterwards.\n"
     "One of the special magic numbers for golden-pencil is: 3326252.\n"
     "One of the special magic numbers for strange-tower is: 1295425.\n"
     "One of the special magic numbers for strange-comet is: 6716969.\n"
     "One of the special magic numbers for warm-cobbler is: 4400887.\n"
     "One of the special magic numbers for fancy-machine is: 7851380.\n"
     "|What is the special magic number for warm-cobbler mentioned in the provided text?| The special magic number for warm-cobbler "
     "mentioned in the provided text is|",
     "4400887"},
    {"ruler/niah-multikey-3", 230,
     "A special magic uuid is hidden within the following text. Make sure to memorize it. I will quiz you about the uuid afterwards.\n"
     "One of the special magic uuids for c421453a-b618-4147-8089-9789dc52dfd9 is: f740e844-492c-4aa5-980b-a98b3e771b16.\n"
     "One of the special magic uuids for 83b58163-ea5e-4754-bf0c-b31f5878141b is: 8002f5b6-50aa-4799-9428-08a2c713aad8.\n"
     "One of the special magic uuids for 6935e2a6-1839-43a1-8bc4-26591b0ab361 is: 82d4b60f-c7dc-4fbd-ac69-ea097c2fc28b.\n"
     "One of the special magic uuids for 2af82e62-05a1-4813-b551-2506bdaab0fa is: 03431b57-8510-44d1-a0bc-efa9d346b611.\n"
     "One of the special magic uuids for f28a86fc-a22a-4bc2-ad0f-55a4e114facc is: e3351494-4f3b-4d69-bcf1-9ca095b2e095.\n"
     "|What is the special magic uuid for c421453a-b618-4147-8089-9789dc52dfd9 mentioned in the provided text?| The special magic "
     "uuid for c421453a-b618-4147-8089-9789dc52dfd9 mentioned in the provided text is|",
     "f740e844-492c-4aa5-980b-a98b3e771b16"},
    {"ruler/niah-multivalue", 230,
     "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about the numbers "
     "afterwards.\n"
     "One of the special magic numbers for proper-sailor is: 2887649. One of the special magic numbers for proper-sailor is: 2688505. "
     "One of the special magic numbers for proper-sailor is: 7573993. Call me Ishmael. Some years ago - never mind how long precisely "
     "- One of the special magic numbers for proper-sailor is: 6504043.\n"
     "|What are all the special magic numbers for proper-sailor mentioned in the provided text?| The special magic numbers for "
     "proper-sailor mentioned in the provided text are|",
     "2688505 2887649 6504043 7573993"},
    {"ruler/niah-multiquery", 230,
     "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about the numbers "
     "afterwards.\n"
     "One of the special magic numbers for sturdy-basket is: 8099128. One of the special magic numbers for calm-jaguar is: 3509997. "
     "Call me Ishmael. One of the special magic numbers for sturdy-sheriff is: 5710717. One of the special magic numbers for fair-rooster "
     "is: 9886724. Some years\n"
     "|What are all the special magic numbers for sturdy-basket, fair-rooster, sturdy-sheriff, and calm-jaguar mentioned in the "
     "provided text?| The special magic numbers for sturdy-basket, fair-rooster, sturdy-sheriff, and calm-jaguar mentioned in the "
     "provided text are|",
     "8099128 9886724 5710717 3509997"},
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
     "Question: Find all variables that are assigned the value 21224 in the text above. Answer: According to the chain(s) of variable "
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
     "|Question: Find all variables that are assigned the value 80674 in the text above.| Answer: According to the chain(s) of "
     "variable assignment in the text above, 5 variables are assigned the value 80674, they are: |",
     "TWCAN EOWMJ KVQWT GPFFF XFXUY"},
    {"ruler/cwe", 438,
     "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most "
     "often.\n"
     "1. distant 2. triangle 3. borrow 4. river 5. foam 6. sparrow 7. gather 8. pine 9. echo 10. pine 11. distant 12. chop 13. "
     "orchard 14. beaver 15. knit 16. orchard 17. knit 18. echo 19. choose 20. echo 21. boat 22. borrow 23. soap 24. pull 25. gather "
     "26. gather 27. distant 28. careful 29. triangle 30. orchard 31. river 32. sneeze 33. sneeze 34. sneeze 35. borrow 36. pine "
     "37. knit 38. shield 39. triangle 40. river\n"
     "Question: What are the 10 most common words in the above list? Answer: The top 10 words that appear most often in the list "
     "are: 1. pine 2. borrow 3. river 4. orchard 5. echo 6. sneeze 7. distant 8. knit 9. triangle 10. gather\n"
     "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most "
     "often.\n"
     "1. suit 2. worry 3. harbor 4. yacht 5. cinema 6. sword 7. yacht 8. harbor 9. sword 10. suit 11. journal 12. branch 13. doctor "
     "14. suit 15. harbor 16. worry 17. doctor 18. harbor 19. cinema 20. sword 21. yacht 22. cinema 23. branch 24. worry 25. doctor "
     "26. plead 27. doctor 28. branch 29. earth 30. suit 31. worry 32. plead 33. suit 34. suit 35. cinema 36. yacht 37. doctor "
     "38. journal 39. journal 40. plead 41. journal 42. branch 43. plead 44. harbor 45. journal 46. plead 47. yacht 48. worry 49. "
     "plead 50. journal 51. worry 52. cinema 53. sword 54. cinema 55. branch 56. sword 57. sword 58. harbor 59. doctor 60. branch "
     "61. yacht\n"
     "|Question: What are the 10 most common words in the above list?| Answer: The top 10 words that appear most often in the list "
     "are:|",
     "doctor worry plead branch suit harbor yacht cinema journal sword"},
    {"ruler/fwe", 230,
     "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared coded words. "
     "... xgbvtx ... ... ujaova ujaova oykedt ... kjmyqf ... ... ... ... ... ... ... xgbvtx ujaova ... ... ... ... ... ... ... "
     "... ujaova ujaova ... ... ... ... ... ohgjxf xgbvtx ujaova oxluzw ... ... ujaova ujaova ... ... ... ... xgbvtx ... ujaova "
     "... ... ... ... ... ... rfzvrp ... ujaova ... ... ... ... ... ... ... ujaova xgbvtx ... ujaova oxluzw ... ... ... ... ... "
     "... ... ... ... ... ... ohgjxf ... ... kjmyqf ujaova ujaova ... xgbvtx xgbvtx ohgjxf ... ... ... ujaova ... xgbvtx ... ... "
     "... ujaova ... ... ... ujaova ... oxluzw ... ... ... ... ... ujaova ujaova ujaova ... ... ohgjxf ohgjxf ... ...\n"
     "|Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently appeared words "
     "in the above coded text?| Answer: According to the coded text above, the three most frequently appeared words are:|",
     "ujaova xgbvtx ohgjxf"},
    {"text/needle", 70,
     "The special magic number for cushion is: 75011. Call me Ishmael. Some years ago - never mind how long precisely - having "
     "little or no money in my purse, I thought I would sail about\n"
     "|What is the special magic number for cushion mentioned in the text?| The special magic number for cushion is:|",
     "75011"},
}};

/// Of seed 7 at a length of 4096 pieces.
inline constexpr std::array<std::pair<std::string_view, std::uint64_t>, 12> kHashes{{
    {"ruler/niah-single-1", 10678792948829933605ULL},
    {"ruler/niah-single-2", 11444976193073579330ULL},
    {"ruler/niah-single-3", 2942684397218773578ULL},
    {"ruler/niah-multikey-1", 6238112716425897466ULL},
    {"ruler/niah-multikey-2", 13199312515717717017ULL},
    {"ruler/niah-multikey-3", 8638796268147285879ULL},
    {"ruler/niah-multivalue", 16949075526585027192ULL},
    {"ruler/niah-multiquery", 7647850026657755395ULL},
    {"ruler/vt", 7109254615874340238ULL},
    {"ruler/cwe", 17195721946588107770ULL},
    {"ruler/fwe", 6053908172492951198ULL},
    {"text/needle", 6455968908615810064ULL},
}};

}  // namespace kvkeep::lm
