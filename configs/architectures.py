"""What each architecture needs to be as large as the Transformer: its heads, and where heads do not do it the MLP.

With D = d_model and h heads of width d = D / h, the Transformer's attention has 4 D² weights a layer. As many have

    diff, signed_mask                    h / 2 heads of two queries, two keys and a value of 2d (§3.1)
    off_by_one, sink, top_k              h heads (sink: and h numbers)

and more or less, which SwiGLU, 3 D weights a unit of its width, gives up or takes:

    diff_v2    5 D² + D h                h heads of two queries, h keys and values, λ of each token and head
    gated      5 D²                      h heads, D² for the gate
    gda        3.5 D²                    h queries, 3 signal heads to a noise head; keys, values for each of these

The new width is rounded to a multiple of 4, for four devices to share; the quickstart's models agree to 0.3 %, larger
ones to less. diff_fixed_lambda is diff with λ = λ_init.
"""

from ml_collections import ConfigDict

SIGNAL_HEADS = 3  # Of gda: a quarter of all queries is noise heads'. Motif-2-12.7B has 4, which few head counts allow.
TOP_K_SHARE = 8  # Of top_k: a row's length over the keys that are kept. No source: tune it.

# Weights of attention beyond 4 D², of D² and of D h.
EXTRA = {"diff_v2": (1, 1), "gated": (1, 0), "gda": (-0.5, 0)}


def choose(c: ConfigDict, architecture: str, *, heads: int) -> None:
    """Make a Transformer of `heads` heads, whose sizes `c` has, into another architecture of as many parameters."""
    m = c.model
    m.architecture = "diff" if architecture == "diff_fixed_lambda" else architecture
    m.num_heads = heads
    m.head_norm = "none"
    if m.architecture in ("diff", "signed_mask", "gda"):
        m.num_heads = heads // 2
        m.head_norm = "rms_affine"
    if architecture == "diff_fixed_lambda":
        m.lambda_learned = False
    if architecture == "gda":
        m.num_heads = SIGNAL_HEADS * (heads // (SIGNAL_HEADS + 1))
        m.signal_heads = SIGNAL_HEADS
    if architecture == "top_k":
        m.top_k = c.data.sequence_length // TOP_K_SHARE
    if architecture in EXTRA:
        squares, lambdas = EXTRA[architecture]
        extra = squares * m.d_model**2 + lambdas * m.d_model * heads
        m.mlp_dim = 4 * round((m.mlp_dim - extra / (3 * m.d_model)) / 4)
