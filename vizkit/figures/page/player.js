"use strict";
// Native controls drive Plotly's frames: they take the keyboard and are read aloud, which Plotly's own do not and are not.
for (const section of document.querySelectorAll(".figure")) {
  const plot = section.querySelector(".plot");
  const play = section.querySelector(".play");
  const scrub = section.querySelector(".scrub");
  const moment = section.querySelector(".moment");
  const content = JSON.parse(section.querySelector(".data").textContent);
  const player = content.player;
  const last = player ? content.frames.length - 1 : 0;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let timer = null;

  const ink = () => getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();

  function announce(frame) {
    moment.textContent = player.labels[frame];
    scrub.setAttribute("aria-valuetext", moment.textContent);
  }

  function show(frame) {
    scrub.value = frame;
    announce(frame);
    return Plotly.animate(plot, [content.frames[frame].name], player.jump).catch(() => {});
  }

  function pause() {
    clearTimeout(timer);
    timer = null;
    play.textContent = "▶ Play";
    play.setAttribute("aria-label", "Play");
  }

  async function advance() {
    const began = performance.now();
    await show(Number(scrub.value) + 1);
    if (timer === null) return;
    if (Number(scrub.value) >= last) return pause();
    timer = setTimeout(advance, Math.max(0, player.frame_ms - (performance.now() - began)));
  }

  play.addEventListener("click", async () => {
    if (timer !== null) return pause();
    play.textContent = "❚❚ Pause";
    play.setAttribute("aria-label", "Pause");
    timer = setTimeout(advance, 0);
    if (Number(scrub.value) >= last) show(0);
  });
  scrub.addEventListener("input", () => { pause(); show(Number(scrub.value)); });

  content.layout.font = { ...content.layout.font, color: ink() };
  const config = { responsive: true, displaylogo: false, showSendToCloud: false };
  Plotly.newPlot(plot, content.data, content.layout, config).then(() => {
    if (player) {
      Plotly.addFrames(plot, content.frames);
      announce(player.first);
    }
    plot.dataset.ready = "true";
  });
  dark.addEventListener("change", () => Plotly.relayout(plot, { "font.color": ink() }));
}
