"""Every field of a difftx config, with its meaning and unit. Nothing has a default anywhere else.

The values here are the paper's 1.4B differential model (arXiv 2410.05258, Tables 6 and 10); the other files in this
folder change what they need. `difftx/config/` holds the types and the checks.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """Return the config with every field."""
    c = ConfigDict()

    c.model = ConfigDict()
    # "diff": differential attention; "transformer": its matched softmax twin. Others: difftx/model/variants.py; what
    # makes each as large as the Transformer: configs/architectures.py.
    c.model.architecture = "diff"
    c.model.vocab_size = 100_288  # Rows of the embedding; at least the tokenizer's size (cl100k_base: 100,277).
    c.model.d_model = 2048  # Width of the residual stream.
    c.model.num_layers = 24
    # Heads. A diff head holds two query/key sub-heads, so the matched Transformer has twice as many (§3.1).
    c.model.num_heads = 8
    # Grouped queries; None: one for each head (gda: for each noise head). Counted like num_heads.
    c.model.num_kv_heads = placeholder(int)
    # d of Eq. 1. None: d_model / heads; a head of diff and signed_mask counts as two, noise heads of gda count too.
    c.model.head_dim = placeholder(int)
    c.model.signal_heads = placeholder(int)  # Of gda alone: signal heads to a noise head; num_heads counts the former.
    c.model.top_k = placeholder(int)  # Of top_k alone: keys that a query attends to.
    # Hidden width of SwiGLU: 8/3 d_model rounded down to a multiple of 64. With this width and one embedding all five
    # sizes of Table 10 round to the printed ones. 5504, a multiple of 128, costs 1 % more and fills a TPU's lanes.
    c.model.mlp_dim = 5440
    c.model.rope_theta = 10_000.0  # Base of the rotary embedding. The paper gives only its value at 64K: 640,000.
    c.model.norm_eps = 1e-5  # Of the RMSNorms in front of each sub-layer and at the end.
    # RMSNorm over each head's output (2d wide): "none", "rms" (Eq. 3, Hugging Face), "rms_affine" (official code);
    # "scalar": one learned factor for all heads of a layer in its place.
    c.model.head_norm = "rms_affine"
    c.model.head_norm_eps = 1e-5
    c.model.lambda_init = placeholder(float)  # A constant; None: 0.8 - 0.6 exp(-0.3 (l - 1)), l = 1, 2, … (§2.1).
    # False: λ is λ_init itself, with no parameters. A fixed λ = 1: also lambda_init = 1 and post_scale = 0.2, say, as
    # 1 - λ_init would zero the output.
    c.model.lambda_learned = True
    c.model.lambda_std = 0.1  # Standard deviation of λ_q1, λ_k1, λ_q2, λ_k2 at the start.
    c.model.post_scale = placeholder(float)  # Factor after the head norm; None: 1 - λ_init (Eq. 3).
    # Projections at the start. "fan_in": uniform, variance 1/(3 fan_in), as torch's Linear in the official code;
    # "normal": N(0, init_std).
    c.model.init = "fan_in"
    c.model.init_std = 0.02  # Standard deviation of init = "normal".
    c.model.embedding_std = 0.02  # Standard deviation of the embedding (the paper and its code are silent).
    # False: W_O and the MLP's last matrix start like all other projections; with "fan_in" that is the initialisation of
    # the official code, and the paper is silent. True: these two matrices, hence both residual branches, start at zero.
    # That is better for both models at 0.1M parameters (docs/results.md); quickstart.py, small.py and toy.py set it.
    c.model.zero_init_output = False
    c.model.tie_embeddings = True  # One embedding in and out: Table 10's sizes need it.
    c.model.compute_dtype = "bfloat16"  # Of activations and matrix products; parameters and λ are float32.
    # What the backward pass keeps of a layer: "none": all that kernels do not make again; "dots": matrix products;
    # "full": its input; "offload": its input, in the host's memory.
    c.model.remat = "dots"
    # Kernel: "auto"; "reference" or "xla" for all architectures, "cudnn" for all but off_by_one, sink, top_k and
    # signed_mask; "pallas_tpu", "pallas_gpu" or "cudnn_wide" for diff and gda; "splash" (TPU) for transformer, diff_v2
    # and gated. See difftx/kernels/__init__.py.
    c.model.attention_implementation = "auto"
    # Attention logits rounded to so many bits (2 to 15) and back, by absmax: what the suite quantize sets. With "auto",
    # "reference" or "xla" above. None: as they are.
    c.model.attention_logit_bits = placeholder(int)
    # What shares a scale: "query": the logits of a query in one head and group; "token": in all heads and groups.
    c.model.attention_logit_granularity = "query"

    c.data = ConfigDict()
    # A store of `difftx prepare`; text: "stdlib" (the running Python's library), a text file, or a glob of them; or
    # "synthetic:mqar", "synthetic:retrieval", "synthetic:copy" (difftx/data/synthetic.py).
    c.data.path = placeholder(str)
    # Several paths in place of the one: ({"name": "books", "path": "stores/books", "weight": 0.7}, …). Weights, of any
    # sum, are shares of the rows; each source is a validation set of its name, and with weight 0 no more than that.
    # On a command line: JSON, or one field, --config.data.sources.0.weight=0.5.
    c.data.sources = ()
    # Other weights later: ({"from_tokens": 10_000_000_000, "weights": (0.3, 0.7)}, …); rounded up to 256 rows.
    c.data.stages = ()
    c.data.upsampling = ConfigDict()  # Of long documents, in each source by itself (§3.3, arXiv 2402.10171).
    c.data.upsampling.longer_than_tokens = placeholder(int)  # Which documents are long; None: no up-sampling.
    c.data.upsampling.share = 0.7  # Of a source's tokens that long documents get; what has more already stays.
    c.data.synthetic = ConfigDict()  # Of paths "synthetic:…".
    c.data.synthetic.vocab_size = 8192  # Tokens used; at most model.vocab_size.
    c.data.synthetic.pairs = 64  # Keys with values in an example of mqar and retrieval.
    c.data.synthetic.query_power = 0.01  # mqar: a gap g before a query has probability ∝ g**(query_power - 1).
    c.data.synthetic.distractors = 256  # retrieval: tokens among the pairs.
    c.data.synthetic.train_examples = 100_000  # An epoch.
    c.data.synthetic.valid_examples = 1000
    c.data.synthetic.seed = 0  # Of the examples; below 2**32.
    c.data.tokenizer = "cl100k_base"  # "bytes", the name of a tiktoken encoding, or a .tiktoken file.
    c.data.verify = False  # True: read a store's files before the first step and compare their SHA-256.
    c.data.sequence_length = 2048  # Tokens a row.
    # Rows out of documents. "concat": documents end to end, cut every sequence_length tokens; "best_fit": documents
    # whole where a row can hold them, with some padding.
    c.data.packing = "concat"
    # True: attention stays inside a document, positions start anew in each, and no document's first token is a target.
    c.data.document_mask = False
    c.data.valid_fraction = 0.05  # Share of a text's documents held out, by the hash of each; a store has its own.
    c.data.seed = 0  # Order of the rows; below 2**32.
    c.data.prefetch_batches = 2  # Batches prepared ahead of the step.
    c.data.cache_path = "~/.cache/difftx"  # Folder of best_fit's indices, by content: runs share it, and all may go.

    c.optimizer = ConfigDict()  # AdamW. Decayed: projections and embeddings. Not: norm gains, λ vectors.
    c.optimizer.learning_rate = 1.5e-4  # After the warm-up.
    c.optimizer.final_learning_rate = 0.0  # After the last step: linear decay from the end of the warm-up.
    c.optimizer.warmup_steps = 375  # Linear, from zero.
    c.optimizer.b1 = 0.9
    c.optimizer.b2 = 0.98
    c.optimizer.eps = 1e-8
    c.optimizer.weight_decay = 0.05
    c.optimizer.clip_norm = 1.0  # Largest global norm of the gradient; None: no clipping. The paper is silent.

    c.train = ConfigDict()
    c.train.steps = 40_000  # Updates.
    c.train.global_batch_tokens = 262_144  # Tokens an update, over all devices and microbatches.
    c.train.accumulation = 1  # Microbatches an update; the gradient is the mean over all their tokens.
    c.train.seed = 0  # Of the parameters.

    c.mesh = ConfigDict()  # Devices along each axis; -1, once: all that are left.
    c.mesh.data = 1  # Copies of the parameters.
    c.mesh.fsdp = -1  # Shards of parameters, moments and batch.
    c.mesh.context = 1  # Shards of a row's tokens.
    # How attention crosses them. "heads": tokens are swapped for heads, whose number must divide; "gather": a device's
    # tokens attend to keys and values of whole rows, gathered; "zigzag": the same, causal work shared out evenly.
    c.mesh.context_method = "heads"
    c.mesh.tensor = 1  # Shards of heads, MLP width and vocabulary.
    c.mesh.slices = 1  # Slices of a multi-slice TPU pod, joined by the data-centre network; they cut mesh.data.
    # "auto": mesh, remat and accumulation come from the table in difftx/parallel/presets.py, by devices and size.
    c.mesh.preset = "none"

    c.multihost = ConfigDict()  # Used when several processes train together (docs/operations.md).
    c.multihost.initialization_timeout_seconds = 1800  # Until all processes have started: cold pods take long.
    # Until a process that says nothing, dead or frozen, is given up. JAX's own heartbeat is given four times that.
    c.multihost.heartbeat_timeout_seconds = 100
    # Until all processes reach the same start, checkpoint or evaluation; also, until a save must be on disk.
    c.multihost.barrier_timeout_seconds = 600
    c.multihost.watchdog_seconds = 1800  # Without a finished step: print all stacks and exit. Compiling counts too.

    c.checkpoint = ConfigDict()
    c.checkpoint.every_steps = 1000  # Also at the last step and on SIGTERM.
    c.checkpoint.keep = 3  # Newest checkpoints kept, and newest at a multiple of every_steps.
    c.checkpoint.keep_every_steps = placeholder(int)  # Also keep the steps that this divides; None: none.
    # Also keep the best by a number of a suite of eval.suites, such as "loss/loss", that runs at every checkpoint.
    c.checkpoint.keep_best = placeholder(str)  # None: not.
    c.checkpoint.keep_best_mode = "min"  # Which is best: "min" the least, "max" the largest.
    # Before a restore compare with the manifest: "checksums": every byte; "sizes": only which files, and how long.
    c.checkpoint.verify = "checksums"
    c.checkpoint.max_failed_saves = 3  # So many failures to save in a row end the run; each is tried again.
    # Weights to start from: a run's directory (its newest checkpoint) or a checkpoint's; None: random ones.
    c.checkpoint.init_from = placeholder(str)

    # An update whose loss or gradient is not finite is always skipped. A step is bad if it was skipped, or if its loss
    # is a spike; what happens to bad steps in a row: difftx/training/guards.py.
    c.guards = ConfigDict()
    c.guards.on_bad_steps = "rewind"  # Back to a good checkpoint and past the data of the bad steps; or "stop".
    c.guards.max_skipped = 10  # Skipped updates among bad steps in a row, until that happens.
    c.guards.skip_steps = 100  # Data passed over beyond the bad steps', in batches.
    c.guards.max_rewinds = 3  # In the whole run; then it stops.
    # A spike: a loss so many robust standard deviations (1.4826 MAD) above the median. None: no loss is one, so that
    # runs that are compared see the same data. Noise of a healthy run stays below 6 or so.
    c.guards.spike_threshold = placeholder(float)
    c.guards.spike_window_steps = 128  # Losses behind median and MAD: the last ones that were not bad.
    c.guards.spike_patience_steps = 8  # Spikes among bad steps in a row, until something happens.

    c.eval = ConfigDict()
    c.eval.every_steps = 1000  # In the training loop; also at the last step.
    c.eval.suites = ("loss",)  # What runs then, see `python eval.py --list`.
    c.eval.loss_tokens = 1_048_576  # Suites loss and recall: at most so many tokens of each validation set.
    # Suite recall: a bigram that occurs more often in the training data is known by heart, and no AR-Hit (Zoology).
    c.eval.recall_max_bigram_count = 1250
    # What `difftx data bigrams` wrote; None: counted at once, where the run tokenises its text itself.
    c.eval.bigrams_path = placeholder(str)
    c.eval.position_documents = 256  # Suite position: at most so many long documents of each validation set.
    c.eval.throughput_rounds = 5  # Suite throughput: turns of each model; the median counts.
    c.eval.throughput_steps = 10  # Batches a turn.
    c.eval.sample_tokens = 200  # Suite sample: new tokens a prompt.
    c.eval.sample_temperature = 0.8  # Suite sample: 0 takes the most likely token.
    c.eval.needle = ConfigDict()  # Suite needle: magic numbers of cities in a long text (§3.4).
    # How many needles are hidden, and how many of them are asked for: Table 2, and Figure 5's 8 and 1.
    c.eval.needle.cases = tuple(
        {"needles": needles, "queries": queries} for needles, queries in ((1, 1), (2, 2), (4, 2), (6, 2), (8, 1))
    )
    c.eval.needle.lengths = ()  # Tokens of prompt and answer, such as (8192, 16384); (): data.sequence_length.
    c.eval.needle.depths = (0.0, 0.25, 0.5, 0.75, 1.0)  # Where the asked needles stand, as shares of the haystack.
    c.eval.needle.samples = 50  # Prompts of each case, length and depth.
    c.eval.needle.new_tokens = 32  # Of the answer, at most.
    # What hides them: a path as data.path takes them (of a store the validation split, of text all); None: the first
    # of the run's validation sets that is text.
    c.eval.needle.haystack = placeholder(str)
    c.eval.needle.seed = 0  # Of cities, numbers, places and haystacks; below 2**32.
    c.eval.icl = ConfigDict()  # Suite icl: classification from demonstrations in the prompt (§3.5).
    # Files of JSON lines (plain, .gz, .zst, .xz) and their fields, and the words in front of text and label:
    # ({"name": "trec", "train": "trec_train.jsonl", "test": "trec_test.jsonl", "text": "text", "label": "coarse",
    #   "text_word": "Question", "label_word": "Type"}, …)
    c.eval.icl.tasks = ()
    c.eval.icl.shots = ()  # Demonstrations of a prompt; (): 1, 2, 4, …, and as many as the context holds.
    c.eval.icl.questions = 250  # Of each test file, at most.
    c.eval.icl.orders = ("random", "alternating")  # Of demonstrations: shuffled, or one of each class in turn.
    c.eval.icl.permutations = 10  # Different ones of the same demonstrations, in each order; all where there are fewer.
    c.eval.icl.seed = 0  # Of demonstrations, questions and permutations; below 2**32.
    # Suite attention: what the last token of a needle prompt attends to (Table 3, Figure 1). Depths, haystack,
    # new_tokens and seed are those of eval.needle.
    c.eval.attention = ConfigDict()
    c.eval.attention.needles = 2  # Hidden in a prompt.
    c.eval.attention.queries = 1  # Of these asked for: the answer.
    c.eval.attention.length = placeholder(int)  # Tokens of prompt and answer; None: data.sequence_length.
    c.eval.attention.samples = 20  # Prompts of each depth.
    c.eval.attention.layers = ()  # That numbers, table and drawn maps are means over, from 1; (): all.
    c.eval.attention.l0_share = 1e-3  # Pseudo-ℓ0 counts entries above this share of their row's sum of |A|.
    c.eval.attention.shown_queries = 8  # Rows of the map that is drawn: the last tokens of one prompt.
    c.eval.outliers = ConfigDict()  # Suite outliers: magnitudes of attention logits and hidden states (Table 5).
    c.eval.outliers.tokens = 400_000  # At most, of each validation set; two passes.
    c.eval.outliers.ranks = (1, 2, 3, 10, 100)  # Among all magnitudes: 1 is the largest.
    c.eval.quantize = ConfigDict()  # Suite quantize: other suites with quantised attention logits (Figure 8).
    c.eval.quantize.bits = (16, 8, 6, 4)  # 2 to 16; 16: not quantised, as in the figure.
    c.eval.quantize.granularity = "query"  # As model.attention_logit_granularity, whose place it takes.
    c.eval.quantize.suites = ("loss",)  # Which; their own fields hold.
    c.eval.gradients = ConfigDict()  # Suite gradients: norms by matrix and layer (Appendix F).
    c.eval.gradients.tokens = 65_536  # At most, of each validation set; of one model's gradient.
    # Also gradients where training starts from, of the same seed: "as_configured"; "no_scale" without the factor
    # 1 - λ_init, "no_norm" without the head norm, "no_scale_no_norm" (of what has these); "counterpart": the
    # Transformer of a diff model, and the other way round. All with model.zero_init_output = False.
    c.eval.gradients.at_initialization = ("as_configured", "no_scale", "no_norm", "no_scale_no_norm", "counterpart")
    # Suite hallucination: what is said of a document that is given (§3.6, Table 4).
    c.eval.hallucination = ConfigDict()
    # Files of JSON lines (plain, .gz, .zst, .xz), "summarisation" (with "question": None) or "question_answering", and
    # the names of their fields, here LongBench's. A document is text, a list of texts or HotpotQA's titles and
    # sentences; answers are a text or a list of texts. new_tokens: of an answer, at most.
    # ({"name": "hotpotqa", "path": "hotpotqa.jsonl", "kind": "question_answering", "document": "context",
    #   "question": "input", "answers": "answers", "new_tokens": 32}, …)
    c.eval.hallucination.sets = ()
    c.eval.hallucination.samples = 100  # Of each set, at most.
    # A document that the context does not hold: "cut_middle": its first and last tokens, as LongBench; or "refuse".
    c.eval.hallucination.long_documents = "cut_middle"
    # A model at eval.judge.base_url, such as "gpt-4o-2024-08-06". None: the offline judge, which compares words.
    c.eval.hallucination.judge_model = placeholder(str)
    c.eval.hallucination.judge_temperature = 0.0  # None: left to the endpoint; some models take no other.
    # Offline judge: a summary is right if this share of its runs of so many words is in the document or a reference.
    c.eval.hallucination.support_words = 2
    c.eval.hallucination.support_threshold = 0.5
    c.eval.hallucination.seed = 0  # Of the samples; below 2**32.
    c.eval.judge = ConfigDict()  # How judge_model is reached: results do not depend on it.
    c.eval.judge.base_url = "https://api.openai.com/v1"  # Any chat completions; with a key: https, or localhost.
    c.eval.judge.key_variable = "OPENAI_API_KEY"  # Environment variable of the key, …_KEY or …_TOKEN; None: no key.
    c.eval.judge.concurrency = 4  # Requests under way at a time.
    c.eval.judge.requests_per_minute = placeholder(float)  # Over all of them; None: no limit but the endpoint's own.
    c.eval.judge.timeout_seconds = 120.0  # Of a request, until its answer is there whole.
    c.eval.judge.attempts = 8  # At a verdict.
    c.eval.judge.backoff_seconds = 1.0  # After the first failed attempt; doubled after each.
    c.eval.judge.longest_wait_seconds = 120.0  # Of that; an endpoint that asks for a longer one ends the suite.
    c.eval.judge.usd_per_million_tokens_in = placeholder(float)  # Prices; None: tokens are printed, and no cost.
    c.eval.judge.usd_per_million_tokens_out = placeholder(float)
    c.eval.harness = ConfigDict()  # Suite harness: tasks of EleutherAI's lm-eval (Tables 1 and 8; extra "eval").
    # Any of lm-eval's tasks and groups, see `lm-eval ls tasks`; these are the paper's.
    c.eval.harness.tasks = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande")
    c.eval.harness.num_fewshot = placeholder(int)  # Examples in a prompt; None: as the task says, 0 for those above.
    c.eval.harness.limit = placeholder(int)  # Of each task only so many questions, the first; None: all.
    # Folder of JSON lines for the tasks above: arc_challenge_test.jsonl, arc_easy_test, boolq_val, hellaswag_val,
    # openbookqa_test, piqa_val, winogrande_val and, for examples, <task>_train (plain, .gz, .zst, .xz; fields:
    # difftx/evals/harness_data.py). None: data from the Hugging Face hub, as of other tasks.
    c.eval.harness.data_path = placeholder(str)
    c.eval.harness.include_path = placeholder(str)  # Folder of lm-eval's YAML files of other tasks.
    # What is longer than the context: True: cut at its left, as lm-eval's own models do, and counted; False: an error.
    c.eval.harness.truncate = False
    c.eval.harness.seed = 1234  # Of the examples in prompts, and of samples where a task wants them; below 2**32.
    # Suite math: word problems, answered in words (ICLR camera-ready, appendix C; extra "eval").
    c.eval.math = ConfigDict()
    # Files of JSON lines (plain, .gz, .zst, .xz) in the published fields of a format (difftx/evals/math_formats.py):
    # ({"name": "gsm8k", "format": "gsm8k", "test": "gsm8k_test.jsonl", "train": "gsm8k_train.jsonl",
    #   "train_format": None}, …). train: demonstrations, None: no file; train_format: of that file, None: as test.
    c.eval.math.tasks = ()
    c.eval.math.shots = 4  # Demonstrations of a prompt, the same for all questions; 0: none.
    c.eval.math.chain_of_thought = True  # Demonstrations with their solutions, or a nudge; False: answers alone.
    c.eval.math.questions = placeholder(int)  # Of each test file only so many, drawn by the seed; None: all.
    c.eval.math.new_tokens = 16_384  # Of an answer, at most, as far as the context holds them.
    c.eval.math.temperature = 0.0  # 0 takes the most likely token.
    c.eval.math.seed = 0  # Of demonstrations, questions and samples; below 2**32.

    c.logging = ConfigDict()
    c.logging.every_steps = 10  # A line of metrics.jsonl.
    c.logging.tensorboard = True  # Event files in <workdir>/tensorboard.
    c.logging.wandb_project = placeholder(str)  # Also to Weights & Biases (extra "wandb"); None: not.
    return c
