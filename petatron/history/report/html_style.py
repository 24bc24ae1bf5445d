"""The style sheet and the script of a report. Both are inside the page, which requests nothing."""

from __future__ import annotations

from petatron.history.draw.svg import PLOT_BOX, SHAPE_STYLE, panel_style
from petatron.history.draw.theme import THEMES, Theme

_LAYOUT = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--text);font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
main{max-width:1240px;margin:0 auto;padding:24px 20px 64px}
h1{font-size:26px;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:18px;margin:36px 0 12px;padding-bottom:6px;border-bottom:1px solid var(--grid)}
.lead{color:var(--muted);margin:6px 0 0;overflow-wrap:anywhere}
.head{display:flex;gap:12px;align-items:center;flex-wrap:wrap}
.state{font-size:13px;font-weight:600;border-radius:999px;padding:2px 12px;border:1px solid currentColor;white-space:nowrap}
.finished{color:var(--good)}.running{color:var(--c0)}.stopped{color:var(--c1)}.failed,.empty{color:var(--alarm)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(132px,1fr));gap:10px;margin-top:20px}
.tile{background:var(--card);border:1px solid var(--grid);border-radius:10px;padding:10px 14px}
.tile b{display:block;font-size:19px;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tile span,.dim{color:var(--muted);font-size:13px}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:12px}
.plot{position:relative;background:var(--card);border:1px solid var(--grid);border-radius:10px;padding:4px;margin:0;min-width:0}
.plot svg{display:block;width:100%;height:auto;touch-action:pan-y}
.tip{position:absolute;pointer-events:none;display:none;background:var(--text);color:var(--page);border-radius:6px;
font-size:12px;line-height:1.4;padding:5px 9px;white-space:nowrap;z-index:2;font-variant-numeric:tabular-nums}
.cross{stroke:var(--muted);stroke-dasharray:3 3;display:none}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
table.fit{width:auto;min-width:min(100%,480px)}
th{text-align:left;font-weight:600;color:var(--muted);font-size:13px}
th,td{padding:5px 14px 5px 0;border-bottom:1px solid var(--grid);vertical-align:top;overflow-wrap:anywhere}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.k{white-space:nowrap;font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:13px}
td.v{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:13px;min-width:9em}
details{margin-top:12px}summary{cursor:pointer;color:var(--muted)}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--card);border:1px solid var(--grid);border-radius:10px;
padding:12px 14px;font-size:13px;margin:8px 0 14px}
pre i{font-style:normal;color:var(--muted)}
.notes{border-left:3px solid var(--c1);padding:2px 14px;margin-top:18px}
.notes p{margin:4px 0}
footer{color:var(--muted);font-size:13px;margin-top:40px}
@media (max-width:640px){main{padding:16px 12px 40px}h1{font-size:22px}.tiles{grid-template-columns:repeat(2,1fr)}
th,td{padding-right:10px}.stack thead{display:none}.stack tr{display:grid;grid-template-columns:minmax(0,2fr) minmax(0,3fr);
padding:6px 0;border-bottom:1px solid var(--grid)}.stack td{border:0;padding:1px 8px 1px 0;min-width:0}
.stack td.k{grid-column:1/-1;white-space:normal}}
@media print{main{max-width:none;padding:0}.tile,.plot,pre,tr{break-inside:avoid}h2{break-after:avoid}
.plots{grid-template-columns:1fr 1fr}details:not([open]){display:none}details>summary{display:none}}
"""

_SCRIPT = """
(function(){
var box=%BOX%;
function near(xs,x){var a=0,b=xs.length-1;while(b-a>1){var m=(a+b)>>1;if(xs[m]<x)a=m;else b=m}
return Math.abs(xs[a]-x)<=Math.abs(xs[b]-x)?a:b}
function num(v){var s=Math.abs(v);if(s!==0&&(s<1e-3||s>=1e15))return v.toExponential(3);
return s>=1e4?Math.round(v).toLocaleString('en'):String(+v.toPrecision(5))}
function place(axis,v){if(axis!=='time')return axis+' '+Math.round(v).toLocaleString('en');
var s=Math.round(v);return Math.floor(s/3600)+':'+('0'+Math.floor(s/60)%60).slice(-2)+':'+('0'+s%60).slice(-2)}
document.querySelectorAll('.plot').forEach(function(plot){
var data=JSON.parse(plot.querySelector('script').textContent),svg=plot.querySelector('svg'),tip=plot.querySelector('.tip');
var ns='http://www.w3.org/2000/svg',cross=document.createElementNS(ns,'line');
cross.setAttribute('class','cross');cross.setAttribute('y1',box[1]);cross.setAttribute('y2',box[1]+box[3]);svg.appendChild(cross);
function hide(){tip.style.display='none';cross.style.display='none'}
function show(e){var r=svg.getBoundingClientRect(),scale=r.width/svg.viewBox.baseVal.width;
var px=(e.clientX-r.left)/scale,x=data.low+(px-box[0])/box[2]*(data.high-data.low);
if(px<box[0]-8||px>box[0]+box[2]+8)return hide();
var at=null,lines=[];
data.curves.forEach(function(c){if(!c.x.length)return;var i=near(c.x,x);
if(at===null)at=c.x[i];
var far=Math.abs(c.x[i]-x)/(data.high-data.low)>0.03;
if(!(c.marks&&far))lines.push(c.label+' '+num(c.y[i])+(data.unit?' '+data.unit:''))});
if(at===null)return hide();
tip.textContent='';[place(data.axis,at)].concat(lines).forEach(function(t,i){var d=document.createElement('div');
d.textContent=t;if(i===0)d.style.opacity=.7;tip.appendChild(d)});
tip.style.display='block';cross.style.display='inline';
var cx=box[0]+(at-data.low)/(data.high-data.low)*box[2];cross.setAttribute('x1',cx);cross.setAttribute('x2',cx);
var left=cx*scale+12;if(left+tip.offsetWidth>r.width)left=cx*scale-tip.offsetWidth-12;
tip.style.left=Math.max(0,left)+'px';tip.style.top=(box[1]*scale+8)+'px'}
svg.addEventListener('pointermove',show);svg.addEventListener('pointerdown',show);svg.addEventListener('pointerleave',hide)});
})();
"""
_CARDS = {"light": ("#f8f9fb", "#1a7f37"), "dark": ("#161b22", "#3fb950")}


def report_style() -> str:
    """Returns the style sheet: light or dark as the reader's system is, and light on paper."""
    light, dark = (_theme_rules(name, THEMES[name]) for name in ("light", "dark"))
    return (
        f"{light}@media screen and (prefers-color-scheme:dark){{{dark}}}{SHAPE_STYLE}{_LAYOUT}"
        ":root{color-scheme:light dark}"
    )


def _theme_rules(name: str, theme: Theme) -> str:
    card, good = _CARDS[name]
    colors = {
        "page": theme.page, "text": theme.text, "muted": theme.muted, "grid": theme.grid, "alarm": theme.alarm,
        "card": card, "good": good, "c0": theme.runs[0], "c1": theme.runs[1],
    }  # fmt: skip
    variables = ";".join(f"--{key}:{value}" for key, value in colors.items())
    return f":root{{{variables}}}{panel_style(theme)}"


def report_script() -> str:
    """Returns the script that shows values under the pointer; without scripts the page shows everything else."""
    return _SCRIPT.replace("%BOX%", str(list(PLOT_BOX)))
