import sys, time, torch, json
sys.path.insert(0, "src")
import eventful
from eventful import Config, TopR, Stream
from eventful.bench import cases
import warnings
torch.backends.cuda.matmul.allow_tf32=True
def med(xs): xs=sorted(xs); return xs[len(xs)//2]
def clips(size,batch,n,dtype):
    g=cases.clip(size,batch=batch); return [next(g).to("cuda",dtype) for _ in range(n)]
def timed(fn, frames, reps):
    ts=[]
    for i in range(reps):
        f=frames[i%len(frames)]
        torch.cuda.synchronize(); t=time.perf_counter(); fn(f); torch.cuda.synchronize(); ts.append((time.perf_counter()-t)*1e3)
    torch.cuda.synchronize(); t=time.perf_counter()
    for i in range(reps): fn(frames[i%len(frames)])
    torch.cuda.synchronize(); pipe=(time.perf_counter()-t)*1e3/reps
    return med(ts), pipe
def graph_dense(model, frame):
    s=torch.cuda.Stream(); buf=frame.clone()
    with torch.no_grad(), torch.cuda.stream(s):
        for _ in range(3): out=model(buf)
        s.synchronize()
        g=torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=s): out=model(buf)
    def run(f):
        buf.copy_(f); g.replay(); return out.clone()
    return run
for name,batch,preset,r in [a.split(",") for a in sys.argv[1].split(";")]:
    batch,r=int(batch),int(r)
    sub=cases.subject(name); torch.manual_seed(0)
    model=sub.make(sub.size,sub.depth).to("cuda",torch.bfloat16)
    frames=clips(sub.size,batch,8,torch.bfloat16)
    row={}
    try:
        d=graph_dense(model,frames[0]); row["graph"]=timed(d,frames,10); row["graph"]=timed(d,frames,20)
    except Exception as e:
        print("graph failed",str(e)[:200])
        with torch.no_grad(): row["eager"]=timed(model,frames,10)
    if "compile" in sys.argv:
        try:
            t0=time.time(); c=torch.compile(model); 
            with torch.no_grad():
                c(frames[0]); d=graph_dense(c,frames[0]); timed(d,frames,10); row["compile+graph"]=timed(d,frames,20); print("compile took",time.time()-t0)
        except Exception as e: print("compile failed",str(e)[:300])
    conv=eventful.convert(model,Config.preset(preset,TopR(r)))
    st=Stream(conv)
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")
        for f in frames: st(f)
        for x in w: print("WARN", str(x.message)[:400])
    with torch.no_grad():
        timed(st,frames,10); row[preset]=timed(st,frames,30)
    best=min(v[0] for k,v in row.items() if k!=preset); bp=min(v[1] for k,v in row.items() if k!=preset)
    print(name,"B",batch,preset,"r",r,{k:[round(x,3) for x in v] for k,v in row.items()},"speedup %.2f pipelined %.2f"%(best/row[preset][0],bp/row[preset][1]),st.last.updated if len(st.last.updated)<4 else "", flush=True)
    if "host" in sys.argv:
        import cProfile, pstats, io
        pr=cProfile.Profile(); torch.cuda.synchronize(); pr.enable()
        for i in range(40): st(frames[i%8]); torch.cuda.synchronize()
        pr.disable(); b=io.StringIO(); pstats.Stats(pr,stream=b).sort_stats("tottime").print_stats(22); print("\n".join(l[:130] for l in b.getvalue().splitlines()[4:34]))
        t=time.perf_counter(); st(frames[0]); t1=time.perf_counter()-t; torch.cuda.synchronize(); print("enqueue ms",t1*1e3)
    if "prof" in sys.argv:
        from torch.profiler import profile, ProfilerActivity
        with profile(activities=[ProfilerActivity.CUDA,ProfilerActivity.CPU]) as p:
            for f in frames[:4]: st(f)
            torch.cuda.synchronize()
        rows=[e for e in p.key_averages() if e.self_device_time_total>0]
        rows.sort(key=lambda e:-e.self_device_time_total)
        for e in rows[:22]: print("   %8.1f us/frame x%5.1f  %s"%(e.self_device_time_total/4,e.count/4,e.key[:90]))
    del st,conv,model
    torch.cuda.empty_cache()

if "tune" in sys.argv:
    sys.path.insert(0,"benchmarks")
    from kernels import replayed
    from eventful import ops
    from eventful.ops.triton import windows as W
    torch.manual_seed(0)
    k,v=(torch.randn(1,4096,768,device="cuda",dtype=torch.bfloat16) for _ in range(2))
    q=torch.randn(1,512,768,device="cuda",dtype=torch.bfloat16)
    y,x=torch.meshgrid(torch.arange(20),torch.arange(20),indexing="ij"); sq=((y+10)*64+x+10).flatten()
    rest=torch.randperm(4096)[:112]; idx=torch.unique(torch.cat([sq,rest]))
    idx=torch.cat([idx,idx[:1].expand(512-len(idx))])[None].cuda()
    pl=W.places_of(idx,4096); g=ops.WindowGrid((64,64),(14,14))
    qh,kh,vh=(ops.split_heads(t,12) for t in (q,k,v)); rel=tuple(torch.randn(1,512,12,14,device="cuda",dtype=torch.bfloat16) for _ in range(2)); pad=(k[0,0],v[0,0])
    for rows in (16,32,64):
        for lanes in (32,64,128,256):
            for warps in (2,4,8):
                for st in (1,2,3):
                    if rows==16 and warps>4: continue
                    try: t=replayed(lambda: W.attend_windows(qh,kh,vh,.125,g,idx,rel,pad,None,pl,rows=rows,lanes=lanes,warps=warps,stages=st),10)
                    except Exception as e: continue
                    print("%7.2f windows rows=%d lanes=%d warps=%d stages=%d"%(t,rows,lanes,warps,st))
