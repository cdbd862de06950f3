"""Worker for fairseq_el, through the interfaces that `fairseq-generate` uses."""

from typing import Any

from bench.parts import age_history
from bench.protocol import Request, serve
from bench.worker_fairseq import FairseqSystem
from fairseq_el.plugin.tasks import ELTranslationConfig, ELTranslationTask


class ELSystem(FairseqSystem):
    def setup_task(self, options: dict[str, Any]) -> ELTranslationTask:
        return ELTranslationTask.setup_task(
            ELTranslationConfig(
                data=options["data"],
                source_lang="source",
                target_lang="target",
                el_packing=options["packing"],
            )
        )

    def build_generator(self, request: Request):
        self.task.cfg.el_attention = request.attention
        return self.task.build_generator([self.model], self.generation_options(request))

    def ageing(self, request: Request):
        return age_history

    def state_bytes(self, generator) -> int:
        return generator.profile.peak_source_bytes + generator.profile.peak_beam_bytes

    def source_state_bytes(self, generator, sample: dict[str, Any]) -> int:
        generator.generate([self.model], sample)
        return generator.profile.peak_source_bytes


if __name__ == "__main__":
    serve(ELSystem)
