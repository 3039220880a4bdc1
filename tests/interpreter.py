"""Triton's interpreter without its repetitions, for whoever runs kernels.py on a CPU."""


def patch_once():
    """The interpreter replaces the functions of triton.language by its own, and looks through all
    of them again at each call of a device function: most of its time. Once a launch is enough."""
    from triton.runtime import interpreter

    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    if hasattr(launch, "__wrapped__"):
        return
    done = set()  # the modules that this launch has seen to

    def replace_once(fn):
        tl = interpreter.tl
        seen = {v.__name__ for v in fn.__globals__.values() if v is tl or v is tl.core}
        if not seen <= done:
            done.update(seen)
            return replace(fn)

    def launch_anew(self, *args, **kwargs):
        done.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            done.clear()

    launch_anew.__wrapped__ = launch
    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_once, launch_anew
