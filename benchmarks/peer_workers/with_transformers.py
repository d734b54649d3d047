"""Worker of benchmarks/peers.py: DiffLlama or Llama of the package transformers on torch, eager or compiled."""

import torch
import transformers
from worker import Task, serve


def main() -> None:
    """Serve the task, whose fields `model` (a config.json) and `compile` only this worker reads."""
    task = Task()
    torch.set_default_device(task.platform)
    torch.set_num_threads(task.threads)
    torch.manual_seed(0)
    fields = {name: value for name, value in task.model.items() if name != "torch_dtype"}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**fields))
    step_model = torch.compile(model) if task.compile else model
    settings = task.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings["lr"],
        betas=(0.9, settings["b2"]),
        weight_decay=settings["weight_decay"],
        fused=True,
    )
    rows = torch.randint(0, fields["vocab_size"], (256, task.length))

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(task.platform, torch.bfloat16, enabled=task.dtype == "bfloat16"):
            return step_model(input_ids=batch, labels=batch, use_cache=False).loss

    def train(steps: int) -> None:
        model.train()
        loss = torch.zeros(())
        for _ in range(steps):
            batch = rows[torch.randint(0, len(rows), (task.rows,))]
            loss = loss_of(batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_norm"])
            optimizer.step()
        loss.item()

    # `generate` compiles the step of a token only with a static cache, and on CPUs only if told so.
    compiling = transformers.CompileConfig()
    compiling._compile_all_devices = True
    compiled = {"cache_implementation": "static", "compile_config": compiling}

    @torch.inference_mode()
    def generate(prompt: int, new: int) -> None:
        model.eval()
        ids = torch.ones((1, prompt), dtype=torch.long)
        lengths = {"min_new_tokens": new, "max_new_tokens": new}
        how = compiled if task.compile and new > 1 else {}
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **how, **lengths)
        assert out.shape[1] == prompt + new

    parameters = sum(weight.numel() for weight in model.parameters())
    serve(train, generate, parameters, None if task.platform == "cpu" else torch.cuda.max_memory_allocated)


main()
