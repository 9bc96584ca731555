"""Train one GPT, or a sweep of them; the whole story, top to bottom.

python train.py position=rope
python train.py -m position=learned,rope,alibi seed=0,1,2 sweep=pos
torchrun --nproc-per-node=2 train.py position=rope
"""

import math
from dataclasses import replace
from pathlib import Path

from gpt.terminal import guard


def final(values: dict, overrides: list[str]):
    """Composed values -> the checked configuration, with the run's name. The same for one run and for a sweep's."""
    from gpt.config import load
    from gpt.errors import ConfigError
    from gpt.naming import check_start, folder_name
    from gpt.prepare import check_source
    from gpt.schema import plain

    for override in overrides:
        if override.lstrip("+").startswith("position.name="):  # the keys would stay those of another scheme
            raise ConfigError("position.name", override.split("=")[1], "position=<scheme>, which brings its own keys")
    config = load(values)
    check_source(config.data, config.tokenizer)
    if config.init_from is not None:
        check_start(config.init_from)
    return replace(config, name=folder_name(plain(config), overrides))


def main(values: dict, overrides: list[str]) -> int:
    config = final(values, overrides)  # first, since what is below takes seconds to import

    import torch

    from gpt import checkpoint, runtime
    from gpt.data import Ahead, Windows
    from gpt.evaluate import validation_loss
    from gpt.model import GPT
    from gpt.optim import build_optimizer, learning_rate, optimizer_tensors, restore_optimizer
    from gpt.prepare import since
    from gpt.progress import Clock, Progress
    from gpt.restore import begin_with, corpus_of, describe, load_weights
    from gpt.run import Follower, Run
    from gpt.schema import plain

    plan, L = config.train, config.model.block_size
    rt = runtime.start(config.runtime)
    own_rows = rt.own_rows(plan.batch_size)  # of each micro-step's sequences, those of this process

    open_run = Run if rt.main else Follower  # under torchrun, process 0 alone writes and speaks
    with open_run(plain(config)) as run:
        decision = rt.agree(run.decision)
        if decision == "skip":
            run.say(f"{run.folder}: done already")
            return run.exit_code

        # the text, the model, the optimizer; where the run was stopped, as they were then
        saved = checkpoint.latest(run.checkpoints, log=run.say) if decision == "resume" else None
        corpus = rt.first(lambda: corpus_of(config, saved, log=run.say))
        if saved and rt.main and (changed := since(config.data, corpus)):
            run.say(changed)
        with runtime.room_for(
            "choose smaller model.n_layer, n_embd or block_size, or a smaller table of the position scheme"
        ):
            model = GPT(config.model, config.position, corpus.tokenizer.vocab_size, config.seed).to(rt.device)
        optimizer = build_optimizer(model, config.optim)
        step, rows, tokens, best = 0, 0, 0, None  # done so far; the checkpointed step with the lowest validation loss
        if saved:
            load_weights(model, saved)
            restore_optimizer(optimizer, model, saved.optimizer_state())
            step, tokens, best = saved.step, saved.state["tokens"], saved.state["best"]
            rows = saved.state.get("rows", tokens // L)
            run.resume_at(step)
        elif config.init_from:
            start = checkpoint.resolve(Path(config.init_from))
            taken = begin_with(model, start, corpus.tokenizer)
            run.note(init_from={"checkpoint": str(start.path), "sha256": start.sha256, **taken})
            changed = "".join(f"; {word}: {', '.join(names)}" for word, names in taken.items() if names)
            run.say(f"{run.folder}: begins with {start.path}{changed}")
        if rt.main:
            checkpoint.check_space(run.checkpoints, 3 * checkpoint.required_bytes(model.state_dict(), {}))
        forward = rt.parallel(torch.compile(model) if config.runtime.compile else model)
        rows_a_step = plan.batch_size * plan.accumulate
        packed = config.data.packing, corpus.train, corpus.train_documents
        windows = Windows(*packed, L, config.seed, rows_a_step, first=step, done=rows)

        count = model.count_parameters()
        tokens_a_step, padded = rows_a_step * L, config.data.packing == "documents"  # padding is no token
        a_step = {"most_tokens_a_step" if padded else "tokens_a_step": tokens_a_step}
        run.note(overrides=overrides, parameters=count, **a_step, **rt.facts())
        run.say(
            f"{run.folder}: {count['total']:,} parameters, {count['position']:,} of them position; "
            f"{'at most ' * padded}{tokens_a_step:,} tokens a step on {rt.device} in {rt.precision}"
            + (f"; going on after step {step}" if step else "")
        )
        if config.optim.warmup >= plan.steps:
            short = f"optim.warmup={config.optim.warmup} does not end within train.steps={plan.steps}"
            run.say(f"{run.folder}: {short}, so the rate never reaches optim.lr={config.optim.lr:g}")

        def micro_batch(number: int) -> tuple:
            """Inputs and targets of a micro-step, numbered over all steps, how many like it make a step, and how many
            targets the step has."""
            at, micro = divmod(number, plan.accumulate)
            first = micro * plan.batch_size
            own = range(first + own_rows.start, first + own_rows.stop)
            return *windows.batch(at, own), windows.worth(at, own) / rt.world, windows.targets(at)

        def train_step() -> tuple[int, dict]:
            """One update, on so many targets: a function of (seed, step) and the weights, as a resumed run needs it."""
            rate = learning_rate(step, plan.steps, config.optim)
            for group in optimizer.param_groups:
                group["lr"] = rate
            runtime.seed_step(config.seed, step, rt.rank)
            model.position.redraw(f"{config.seed}/{step}")
            loss = torch.zeros((), device=rt.device)
            for micro in range(plan.accumulate):
                *both, worth, targets = next(batches)
                x, y = rt.to_device(*both)
                with rt.gradients(forward, last=micro == plan.accumulate - 1), rt.autocast():
                    part = forward(x, y)[1] / worth
                part.backward()
                loss += part.detach()
            loss = float(rt.mean(loss))
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip or math.inf))
            runtime.check_finite(step + 1, loss=loss, grad_norm=norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return targets, {"loss": loss, "lr": rate, "grad_norm": norm}

        def validate() -> float:
            loss = rt.agree(validation_loss(model, corpus.val, plan.eval_tokens, rt) if rt.main else None)
            runtime.check_finite(step, val_loss=loss)
            return loss

        def save(val_loss: float | None) -> None:
            nonlocal best
            if val_loss is not None and (best is None or val_loss < best["val_loss"]):
                best = {"step": step, "val_loss": val_loss}
            if rt.main:
                state = describe(plain(config), corpus) | {"rows": rows, "tokens": tokens, "best": best}
                tensors = optimizer_tensors(optimizer, model)
                checkpoint.save(run.checkpoints, step, model.state_dict(), tensors, state)
                checkpoint.prune(run.checkpoints, best and best["step"])
                run.note(step=step)
            rt.barrier()

        sizes = f"train.batch_size={plan.batch_size}, model.block_size={L}"
        room = runtime.room_for(f"{sizes} are too large; lower train.batch_size and raise train.accumulate")
        batches = Ahead(micro_batch, step * plan.accumulate, plan.steps * plan.accumulate)
        with Progress(config.name, step, plan.steps, shown=rt.main) as progress, room, batches:
            run.say = progress.say
            if step == 0:
                progress.update(0, val_loss=validate())
            run.patient = True  # from here on a signal lets the step at work end and be saved
            clock, stop = Clock(), rt.agree(run.stop)
            while step < plan.steps and not stop:
                targets, values = train_step()
                step, rows, tokens = step + 1, rows + rows_a_step, tokens + targets
                clock.tokens += targets

                last = step == plan.steps
                evaluate = last or step % plan.eval_every == 0
                log = evaluate or step % plan.log_every == 0
                if log:
                    speed = clock.speed()
                    mfu = rt.mfu(model.flops_per_token(L) * speed)
                    values |= {"tokens_per_second": speed, "mfu": mfu, "memory": rt.peak_memory()}
                with clock.paused():
                    if evaluate:
                        values["val_loss"] = validate()
                    if log:
                        run.log(step, tokens=tokens, **values)
                        progress.update(step, **values)
                    stop = rt.agree(run.stop)  # a signal came: the step is finished, it is saved, and that is all
                    if last or stop or step % plan.checkpoint_every == 0:
                        save(values.get("val_loss"))
            if step == plan.steps:
                run.done(step)
            else:
                progress.say(f"{run.folder}: stopped after step {step}; the same command goes on from there")
    runtime.stop(rt)
    return run.exit_code


def start() -> None:
    from gpt import cli

    cli.run("train", main, final)


if __name__ == "__main__":
    guard(start)
