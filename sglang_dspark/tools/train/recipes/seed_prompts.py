"""Prompts for a training corpus that needs no dataset: templated tasks, and openings that the target finishes itself.

Three domains are covered: arithmetic word problems, small Python functions and general chat. `templated` fills templates;
`openings` gives first words of a user turn for `sglang_dspark.tools.train.corpus.invent_prompts` to complete. Everything is
drawn from one seeded generator, so a seed names a corpus.
"""

from __future__ import annotations

import random

NAMES = (
    "Aisha Ben Carla Diego Elena Farid Grace Hiro Ines Jamal Kira Leo Maya Noah Olga Priya Quinn Rosa Sam Tara Uma Victor "
    "Wei Yara Zoe Anton Bella Chen Dana Emil Fiona George Hannah Ivan Julia Karim Linda Marco Nina Oscar"
).split()
ITEMS = (
    "apples books marbles stickers cookies pencils tickets eggs roses coins cards candles shirts bottles cakes toys stamps "
    "balloons oranges muffins bracelets magazines chairs"
).split()
PLACES = "shop school farm market library bakery park museum factory garden station restaurant".split()
# How a user may end a problem of mathematics; none is the sentence of a set that drafters are measured with.
MATH_ENDINGS = (
    "",
    "",
    " Show how you get there.",
    "\nThink it through before you answer.",
    "\nWork it out line by line. The last line is the result alone.",
    "\nExplain each step, then give the result as \\boxed{result}.",
    " Solve it carefully and write the final number in a box: \\boxed{...}",
    "\n\nGive a detailed solution.",
    " Let's think step by step.",
    "\nWhat is the answer, and why?",
)

_MATH_TEMPLATES = (
    "{a} has {x} {item}. {b} has {k} times as many {item} as {a}. How many {item} do they have together?",
    "{a} buys {x} {item} for ${k} each and pays with a ${big} note. How much change does {a} get back?",
    "A {place} sells {x} {item} every day. Each one costs ${k}. How much money does the {place} make in {y} days?",
    "{a} had {big} {item}. {a} gave {x} of them to {b} and then lost {y} more. How many {item} are left?",
    "There are {x} boxes with {y} {item} in each box. {a} takes out {k} {item} from every box. How many {item} remain?",
    "{a} runs {k} kilometers every day, and {b} runs {y} kilometers every day. How much further does {b} run than {a} in "
    "{x} days, if the answer can be negative?",
    "A train travels at {big} miles per hour for {k} hours and then at {x} miles per hour for {y} hours. How far does it go?",
    "{a} earns ${x} per hour and works {k} hours a day for {y} days. {a} spends ${big} on {item}. How much is left?",
    "{a} reads {x} pages on Monday, twice as many on Tuesday, and {k} fewer than on Tuesday on Wednesday. How many pages does "
    "{a} read in total?",
    "A {place} has {big} {item}. {percent}% of them are sold in the morning and {x} more in the afternoon. How many are left?",
    "{a} is {k} times as old as {b}. In {y} years {a} will be {big} years old. How old is {b} now?",
    "{a}, {b} and {c} share {big} {item}. {a} takes half of them, {b} takes {x}, and {c} takes the rest. How many does {c} get?",
    "It takes {a} {x} minutes to paint one chair and {b} {y} minutes. How long do they need for {k} chairs each, working one "
    "after the other?",
    "A recipe needs {k} cups of flour for {x} {item}. How many cups of flour does {a} need for {big} {item}?",
    "{a} saves ${x} every week. {a} wants to buy a bicycle for ${big} and already has ${y}. How many weeks does it take?",
    "The {place} charges ${k} for a child and twice as much for an adult. How much do {x} children and {y} adults pay?",
)
_MATH_OPENINGS = (
    "{a} has {x}; {a} bought {x}; A {place} sells; There are {x} {item}; {a} and {b} are; If a car travels; "
    "How many {item}; {a} works {k} hours; In a {place}, there are; {a} wants to buy; What is {x} percent of; "
    "A rectangle has; {a} earns ${x}; Every day, {a}; Solve the equation; The price of; A train leaves; A company; "
    "A farmer has; The sum of; The average of; The ratio of; What is the probability; What is the area of; "
    "Find the value of; If x; How many; How much; How long does it take; In a survey; In a class of {x} students; "
    "When a number is; Each; {a} is; {a} spends; {a}'s; On Monday, {a}; After; Given that; Calculate the; Simplify"
).split("; ")

_AGGREGATES = (
    ("sum", "the sum of", "int"),
    ("product", "the product of", "int"),
    ("count", "the number of", "int"),
    ("largest", "the largest of", "int"),
    ("smallest", "the smallest of", "int"),
    ("average", "the average of", "float"),
    ("sorted", "a sorted list of", "List[int]"),
    ("reversed", "a list in reverse order of", "List[int]"),
    ("squares", "a list of the squares of", "List[int]"),
    ("unique", "a list without duplicates of", "List[int]"),
    ("first", "the first of", "int"),
    ("has", "True if there are any of", "bool"),
)
_FILTERS = (
    ("even", "the even numbers"),
    ("odd", "the odd numbers"),
    ("positive", "the positive numbers"),
    ("negative", "the negative numbers"),
    ("prime", "the prime numbers"),
    ("multiples", "the numbers divisible by k"),
    ("above", "the numbers greater than k"),
    ("all", "all numbers"),
    ("repeated", "the numbers that appear more than once"),
    ("two_digit", "the numbers with two digits"),
)
_STRING_TASKS = (
    ("count_vowels", "text: str", "int", "Count the vowels in the text.", 'count_vowels("banana")', "3"),
    ("reverse_words", "text: str", "str", "Reverse the order of the words.", 'reverse_words("a b c")', "'c b a'"),
    (
        "is_palindrome",
        "text: str",
        "bool",
        "Check if the text reads the same backwards.",
        'is_palindrome("level")',
        "True",
    ),
    ("remove_spaces", "text: str", "str", "Remove all spaces from the text.", 'remove_spaces("a b")', "'ab'"),
    ("word_lengths", "text: str", "List[int]", "Return the length of every word.", 'word_lengths("to be")', "[2, 2]"),
    ("most_common_letter", "text: str", "str", "Return the most common letter.", 'most_common_letter("hello")', "'l'"),
    ("capitalize_words", "text: str", "str", "Capitalize every word.", 'capitalize_words("hi you")', "'Hi You'"),
    ("count_words", "text: str", "int", "Count the words in the text.", 'count_words("one two")', "2"),
    ("longest_word", "words: List[str]", "str", "Return the longest word.", 'longest_word(["a", "bbb"])', "'bbb'"),
    (
        "join_with_comma",
        "words: List[str]",
        "str",
        "Join the words with a comma.",
        'join_with_comma(["a", "b"])',
        "'a,b'",
    ),
    ("factorial", "n: int", "int", "Return the factorial of n.", "factorial(4)", "24"),
    ("fibonacci", "n: int", "int", "Return the n-th Fibonacci number.", "fibonacci(6)", "8"),
    ("is_prime", "n: int", "bool", "Return True if n is a prime number.", "is_prime(7)", "True"),
    ("gcd", "a: int, b: int", "int", "Return the greatest common divisor.", "gcd(12, 8)", "4"),
    ("digits_sum", "n: int", "int", "Return the sum of the digits of n.", "digits_sum(123)", "6"),
    ("flatten", "lists: List[List[int]]", "List[int]", "Flatten a list of lists.", "flatten([[1], [2]])", "[1, 2]"),
    ("merge", "a: List[int], b: List[int]", "List[int]", "Merge two sorted lists.", "merge([1, 3], [2])", "[1, 2, 3]"),
    (
        "rotate",
        "xs: List[int], k: int",
        "List[int]",
        "Rotate the list by k steps.",
        "rotate([1, 2, 3], 1)",
        "[3, 1, 2]",
    ),
    ("invert", "d: Dict[str, int]", "Dict[int, str]", "Swap keys and values.", "invert({'a': 1})", "{1: 'a'}"),
    ("to_binary", "n: int", "str", "Return n in binary.", "to_binary(5)", "'101'"),
    ("celsius", "f: float", "float", "Convert Fahrenheit to Celsius.", "celsius(32.0)", "0.0"),
    ("second_largest", "xs: List[int]", "int", "Return the second largest number.", "second_largest([1, 2, 3])", "2"),
    ("transpose", "m: List[List[int]]", "List[List[int]]", "Transpose a matrix.", "transpose([[1, 2]])", "[[1], [2]]"),
    ("is_leap_year", "year: int", "bool", "Return True if it is a leap year.", "is_leap_year(2000)", "True"),
    (
        "starts_with",
        "words: List[str], p: str",
        "List[str]",
        "Keep words starting with p.",
        'starts_with(["ab"], "a")',
        "['ab']",
    ),
    ("balanced", "text: str", "bool", "Check if the brackets are balanced.", 'balanced("(())")', "True"),
    ("common", "a: List[int], b: List[int]", "List[int]", "Return common elements.", "common([1, 2], [2])", "[2]"),
    (
        "closest_pair",
        "xs: List[float]",
        "Tuple[float, float]",
        "Return the closest two.",
        "closest_pair([1.0, 5.0, 5.5])",
        "(5.0, 5.5)",
    ),
    ("encode", "text: str, k: int", "str", "Shift every letter by k.", 'encode("ab", 1)', "'bc'"),
    (
        "count_substring",
        "text: str, s: str",
        "int",
        "Count overlapping matches of s.",
        'count_substring("aaa", "aa")',
        "2",
    ),
)
_CODE_ASKS = (
    "Fill in the body of this function.\n\n{stub}",
    "Complete this function:\n```python\n{stub}\n```",
    "I need the implementation of\n```\n{stub}\n```\nin plain Python.",
    "```python\nfrom typing import *\n\n\n{stub}\n```\nImplement what the docstring says.",
    "Here is a stub:\n\n```python\n{stub}\n```\n\nFinish it, and explain your code briefly.",
    "{stub}\n\nHow would you write this function?",
)
_CODE_OPENINGS = (
    "Write a Python function; Write a Python program to; Write a function that takes a list of; "
    "Write a function that takes a string and; Implement a class in Python; How do I write a Python script that; "
    "Write a Python function to check if; Create a Python function that returns; Using Python, write a function; "
    "Given a list of integers, write; Write a program; Write a C++ program; Write a C++ function; "
    "Write a JavaScript function; Write a Java method; Write a SQL query; Write an HTML page; Write a shell script; "
    "Write a regular expression; Implement an algorithm; Implement a function that; Implement a data structure; "
    "What does the following code do; Find the bug in the following; Explain the following Python code; "
    "How can I sort; Write a recursive function; Write a function to find; Write a function named; "
    "Write a unit test for; Given a string, write; Given two strings; Given a matrix; "
    "Given an array of integers, find; Solve the following problem in Python; def"
).split("; ") + [ask[: ask.index("{stub}")] + "def" for ask in _CODE_ASKS] * 4

TOPICS = (
    "renewable energy; the French Revolution; learning to play the guitar; healthy breakfasts; black holes; "
    "time management; a lost dog; climate change; online privacy; city gardening; ancient Egypt; job interviews; "
    "machine learning; friendship; public transport; the ocean; running a small business; photosynthesis; "
    "video games; sleep; travelling in Japan; a haunted house; electric cars; reading to children; vaccines; "
    "the stock market; coffee; chess; space exploration; writing a novel; the Roman Empire; social media; football; "
    "mental health; cooking pasta; a dragon and a knight; volcanoes; saving money; learning a language; bees; "
    "democracy; computer viruses; a birthday party; remote work; dinosaurs; the human heart; jazz music; "
    "hiking in the mountains; robots in hospitals; supply and demand; plate tectonics; the water cycle; "
    "DNA and genes; gravity; chemical reactions; electricity; the immune system; evolution; quantum mechanics; "
    "solar panels; bridges and how they are built; the Industrial Revolution; the Cold War; inflation; "
    "international trade; unemployment; human rights; the philosophy of happiness; Greek mythology; "
    "Shakespeare's plays; Impressionist painting; the history of writing; education in schools; "
    "artificial intelligence at work; databases; web design; cloud computing; open-source software; a broken laptop; "
    "a delayed flight; a new colleague; a product launch; customer complaints; a restaurant opening; "
    "a neighbour who plays loud music; a school trip; a wedding speech; a lighthouse keeper; two rival inventors; "
    "a time machine; a detective in a small town; the first day on Mars; an old photograph; rain; "
    "winter in the city; the desert at night; yoga; running a marathon; vegetarian food; baking bread; "
    "a weekend in Rome; camping with children; adopting a cat; buying a used car; renting an apartment; taxes; "
    "retirement; public speaking; teamwork; leadership; creativity; honesty; recycling; water shortages; "
    "wildlife protection; museums; theatre; film music; photography; fashion; tea; basketball; swimming; cycling; "
    "board games; podcasts; newspapers; libraries"
).split("; ")
ROLES = (
    "history teacher; travel guide; doctor; chef; financial adviser; pirate captain; job interviewer; "
    "personal trainer; physics professor; gardener; science-fiction author; sports commentator; judge; therapist; "
    "software engineer; medieval king; talking tree; robot that has just woken up; stand-up comedian; news reporter; "
    "famous inventor; wise grandmother; customer support agent; biologist; philosopher; marketing manager"
).split("; ")
_CHAT_TEMPLATES = (
    "Write a short story about {t}.",
    "Explain {t} to a ten-year-old.",
    "Give me five tips about {t}.",
    "Write an email to a colleague about {t}.",
    "What are the advantages and disadvantages of {t}?",
    "Write a blog post about {t}.",
    "Imagine you are an expert on {t}. What would you tell a beginner?",
    "Write a poem about {t}.",
    "Compare {t} with {t2}.",
    "What is the most common mistake people make about {t}?",
    "Summarize what you know about {t} in three sentences.",
    "Make a plan for a week that is about {t}.",
    "Write a dialogue between {a} and {b} about {t}.",
    "Describe {t} as if you were a detective.",
    "List the main ideas behind {t} and give an example of each.",
    "How did {t} change over the last hundred years?",
    "Write a persuasive speech about {t}.",
    "Which questions would you ask in an interview about {t}?",
    "Who should care about {t}, and why?",
    "Draft an outline of an essay that connects {t} and {t2}.",
    "Act as a {role} and talk about {t}.",
    "You are a {role}. A visitor asks you about {t}. What do you answer?",
    "Pretend to be a {role} who has strong opinions about {t}, and answer my questions. Why should I care about {t}?",
    "Write an announcement about {t} in fewer than {hundreds} words.",
    "Write a letter of complaint about {t}. Stay polite.",
    "Write the opening paragraph of a novel about {t}.",
    "Write a product description for something that has to do with {t}.",
    "Describe a scene with {t} so that the reader can see, hear and smell it.",
    'Rewrite this sentence so that it sounds more formal: "I do not know much about {t}, but {t2} is fun."',
    'Correct the mistakes in this text: "{a} and {b} was talking about {t} when they seen it."',
    "What is the relationship between {t} and {t2}? Give two examples.",
    "What are the causes and the consequences of {t}?",
    "Explain step by step how {t} works, and name one open question.",
    "Discuss how {t} has influenced society.",
    "Give a balanced argument for and against {t}.",
    "What would happen if there were no {t}?",
    "Make a table with three columns about {t}: aspect, advantage, disadvantage.",
    'Answer in JSON with the keys "topic", "summary" and "keywords": what is {t} about?',
    'Extract all names from this text as a list: "{a} met {b} at the {place} to talk about {t}. Later {c} joined them."',
    'Read this review and say whether it is positive, negative or neutral: "The book about {t} was {adjective}."',
    "{a} is taller than {b}, and {b} is taller than {c}. Who is the tallest? Explain your reasoning.",
    "{a} arrived before {b} but after {c}. In which order did they arrive?",
    "Which of these does not belong with the others: {item}, {t}, {place}? Explain why.",
    "If it takes {k} people {x} minutes to finish a job, how long do {y} people need? Think carefully.",
    "Design a simple experiment about {t}. What do you measure?",
    "Prepare five quiz questions about {t} with their answers.",
    'Translate into simple words: "The significance of {t} can hardly be overestimated."',
    "Recommend three books about {t}, with one sentence on each.",
)
_CHAT_OPENINGS = (
    "; ; ; Write; What; How; Can you; Explain; Describe; Imagine; Why; Compare; I; Pretend you are; Give me; Which; "
    "Summarize the following text:; Rewrite the following sentence; Extract; Is it true that; Draft; Suppose; ; ; "
    "Act as a {role}; You are a {role}.; Pretend you are a {role}; Write a short story about; Write an email; "
    "Write a letter; Write an essay about; Write a blog post about; Write a poem; Write a review of; "
    "Edit the following paragraph; Given the following text, identify; Given the following data; "
    "Read the following passage and answer; Extract the; Classify the following; Translate; List; "
    "What is the difference between; What are the; What is the; What would happen if; What causes; How does; "
    "How can I; How do; Why do; Describe the process of; Describe a; Discuss; Analyze; Explain how; "
    "Explain the concept of; In the field of; Provide an overview of; Provide; Outline; Design; Create a; Develop a; "
    "Suggest; Recommend; Help me; Tell me about; My; We; The following; If all; If a; Two; There are three; "
    "Imagine you are writing; Which of the following; Who; When; Where; Is; Are; Do; Should; In your opinion; "
    "Using the; Find; Generate; Identify; Assume; Consider; Convert; Calculate; Evaluate; Tell me about {t}; "
    "I want to learn about {t}; Write about {t} and {t2}; What do you think about {t}; Can you explain {t}"
).split("; ")


def templated(domain: str, count: int, seed: int) -> list[str]:
    """`count` user turns of `domain` ("math", "code" or "chat") filled from templates."""
    rng = random.Random(f"{seed}/templated/{domain}")
    return [_TEMPLATED[domain](rng) for _ in range(count)]


def openings(domain: str, count: int, seed: int) -> list[str]:
    """First words of `count` user turns of `domain`, for the target to complete; may be empty."""
    rng = random.Random(f"{seed}/openings/{domain}")
    patterns = {"math": _MATH_OPENINGS, "code": _CODE_OPENINGS, "chat": _CHAT_OPENINGS}[domain]
    return [rng.choice(patterns).format(**_fillers(rng)) for _ in range(count)]


def _fillers(rng: random.Random) -> dict[str, object]:
    a, b, c = rng.sample(NAMES, 3)
    t, t2 = rng.sample(TOPICS, 2)
    return {
        "a": a,
        "b": b,
        "c": c,
        "item": rng.choice(ITEMS),
        "place": rng.choice(PLACES),
        "x": rng.randint(3, 60),
        "y": rng.randint(2, 30),
        "k": rng.randint(2, 9),
        "big": rng.choice((40, 60, 75, 80, 90, 100, 120, 150, 200, 240, 300, 500)),
        "percent": rng.choice((10, 20, 25, 30, 40, 50, 60, 75)),
        "hundreds": rng.choice((50, 100, 150, 200)),
        "role": rng.choice(ROLES),
        "adjective": rng.choice(("wonderful", "far too long", "fine", "boring", "the best I have read", "confusing")),
        "t": t,
        "t2": t2,
    }


def _math(rng: random.Random) -> str:
    return rng.choice(_MATH_TEMPLATES).format(**_fillers(rng)) + rng.choice(MATH_ENDINGS)


def _chat(rng: random.Random) -> str:
    return rng.choice(_CHAT_TEMPLATES).format(**_fillers(rng))


def _code(rng: random.Random) -> str:
    if rng.random() < 0.5:
        name, arguments, returns, text, call, result = rng.choice(_STRING_TASKS)
        stub = f'def {name}({arguments}) -> {returns}:\n    """ {text}\n    >>> {call}\n    {result}\n    """'
    else:
        (verb, phrase, returns), (kind, numbers) = rng.choice(_AGGREGATES), rng.choice(_FILTERS)
        argument = rng.choice(("numbers", "xs", "values", "arr", "lst"))
        arguments = f"{argument}: List[int]" + (", k: int" if numbers.endswith("k") else "")
        stub = (
            f'def {verb}_{kind}({arguments}) -> {returns}:\n    """ Return {phrase} {numbers} in {argument}.\n    """'
        )
    return rng.choice(_CODE_ASKS).format(stub=stub)


_TEMPLATED = {"math": _math, "code": _code, "chat": _chat}
