"""The words of RULER that end up in a prompt: data, taken over as they are.

Source: NVIDIA/RULER, Apache-2.0, commit c3f5e3b:
https://github.com/NVIDIA/RULER/blob/c3f5e3b/scripts/data/synthetic/constants.py (task templates),
https://github.com/NVIDIA/RULER/blob/c3f5e3b/scripts/data/synthetic/niah.py (needle, noise),
https://github.com/NVIDIA/RULER/blob/c3f5e3b/scripts/data/synthetic/variable_tracking.py (links),
https://github.com/NVIDIA/RULER/blob/c3f5e3b/scripts/data/synthetic/qa.py (documents),
https://github.com/NVIDIA/RULER/blob/c3f5e3b/scripts/data/template.py (model templates).
Every space decides bytes: a changed character here is another benchmark.
"""

from __future__ import annotations

NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
"""Always plural, also where one value is asked for."""

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

NIAH_TEMPLATE = (
    "Some special magic {type_needle_v} are hidden within the following text."
    " Make sure to memorize it. I will quiz you about the {type_needle_v} afterwards."
    "\n{context}\n"
    "What are all the special magic {type_needle_v} for {query} mentioned in the provided text?"
)

NIAH_ANSWER_PREFIX = (
    " The special magic {type_needle_v} for {query} mentioned in the provided text are"
)

SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer"))
"""Replacements, in this order, where a prompt asks for one value."""

FIRST_LINK = "VAR {name} = {value}"
LINK = "VAR {name} = VAR {before} "
"""The space at the end is RULER's."""

VARIABLE_TRACKING_TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text."
    "\n\n{context}\n"
    "Question: Find all variables that are assigned the value {query} in the text above."
)

VARIABLE_TRACKING_ANSWER_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above,"
    " {num_v} variables are assigned the value {query}, they are: "
)

COMMON_WORDS_TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than others."
    " Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)

COMMON_WORDS_ANSWER_PREFIX = " Answer: The top 10 words that appear most often in the list are:"

CODED_NOISE = "..."
"""Stands in for the most frequent word. The question speaks of one dot more."""

FREQUENT_WORDS_TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word."
    " Find the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'."
    " What are the three most frequently appeared words in the above coded text?"
)

FREQUENT_WORDS_ANSWER_PREFIX = (
    " Answer: According to the coded text above, the three most frequently appeared words are:"
)

DOCUMENT = "Document {number}:\n{document}"

QA_TEMPLATE = (
    "Answer the question based on the given documents. Only give me the answer and do not output"
    " any other words.\n\nThe following are given documents.\n\n{context}\n\n"
    "Answer the question based on the given documents. Only give me the answer and do not output"
    " any other words.\n\nQuestion: {query}"
)

QA_ANSWER_PREFIX = " Answer:"

TASK = "{task_template}"
"""Stands for the task's template within a model's template."""

MODEL_TEMPLATES = {
    "base": TASK,
    "meta-chat": "[INST] {task_template} [/INST]",
    "vicuna-chat": (
        "A chat between a curious user and an artificial intelligence assistant. The assistant"
        " gives helpful, detailed, and polite answers to the user's questions."
        " USER: {task_template} ASSISTANT:"
    ),
    "lwm-chat": "You are a helpful assistant. USER: {task_template} ASSISTANT: ",
    "command-r-chat": (
        "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>{task_template}<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    ),
    "chatglm-chat": "[gMASK]sop<|user|> \n {task_template}<|assistant|> \n ",
    "RWKV": (
        "User: hi\n\nAssistant: Hi. I am your assistant and I will provide expert full response"
        " in full details. Please feel free to ask any question and I will always answer it"
        "\n\nUser: {task_template}\n\nAssistant:"
    ),
    "Phi3": "<|user|>\n{task_template}<|end|>\n<|assistant|>\n",
    "meta-llama3": (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{task_template}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "jamba": (
        "<|startoftext|><|bom|><|system|> <|eom|><|bom|><|user|> {task_template}<|eom|>"
        "<|bom|><|assistant|>"
    ),
    "nemotron5-instruct": (
        "<SPECIAL_10>System\n\n<SPECIAL_11>User\n{task_template}\n<SPECIAL_11>Assistant\n"
    ),
}
