"""Commands of difftx, one module each."""

# Command → description. Each command is a module in this package with a function `main(arguments) -> exit code`.
COMMANDS = {
    "train": "train a model, or resume a run",
    "eval": "run evaluation suites on a run, draw curves, or fit scaling laws",
    "report": "write an HTML page about one run, or compare several",
    "generate": "complete a prompt, or a file of prompts, with a trained model",
    "chat": "talk to a trained model: prompts in a loop, with one load and one compilation",
    "prepare": "tokenise text, JSON lines, Parquet or a Hugging Face dataset",
    "data": "verify a token store, show a row of it, or count its bigrams",
    "tokenizer": "train a tokenizer on text",
    "doctor": "check whether training can start on this machine, and how fast it will be",
    "plan": "estimate the memory and time of a config on devices that are not attached",
    "sweep": "run a grid of configs on this machine, or write its job files",
    "checkpoint": "list, verify, compare or delete the checkpoints of a run",
    "convert": "convert weights from and to Hugging Face and the official layout",
}
