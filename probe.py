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
    if "phases" in sys.argv:
        from eventful import residence as R, stepper as S
        marks=[]
        old=torch.cuda.CUDAGraph.replay
        def rep(self):
            a=time.perf_counter(); old(self); marks.append(("replay",a,time.perf_counter()))
        torch.cuda.CUDAGraph.replay=rep
        tot=[]
        for i in range(30):
            torch.cuda.synchronize(); marks.clear(); t=time.perf_counter(); st(frames[i%8]); e=time.perf_counter(); torch.cuda.synchronize(); z=time.perf_counter()
            tot.append([(marks[0][1]-t),(marks[0][2]-marks[0][1]),(marks[1][1]-marks[0][2]),(marks[1][2]-marks[1][1]),(e-marks[1][2]),(z-e)])
        torch.cuda.CUDAGraph.replay=old
        print("phases us (pre, A, between, B, post, wait):",[round(med([r[i] for r in tot])*1e6) for i in range(6)])
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
    from eventful.ops.triton import exact as E, gates as G
    torch.manual_seed(0)
    D="cuda"; mk=lambda *s,dt=torch.bfloat16: torch.randn(*s,device=D,dtype=dt)
    for N in (4097,):
        mem=ops.ExactMemory(mk(1,N,768),mk(1,N,768),mk(1,N,768),mk(1,N,768,dt=torch.float32),mk(1,N,12,dt=torch.float32).abs()+8,mk(1,N,12,dt=torch.float32).abs()+9)
        err=torch.rand(1,N,device=D); sl=torch.zeros(1,dtype=torch.int64,device=D); rep=torch.zeros(1,3,dtype=torch.int32,device=D)
        rule=ops.PickRule(torch.zeros(1,device=D),torch.full((1,),512,device=D),leading=False)
        lead=ops.PickRule(torch.zeros(1,device=D),torch.full((1,),512,device=D),leading=True,scene=torch.ones(1,device=D),cut=(4.,.5,.9),period=59,turn=torch.zeros(1,dtype=torch.int64,device=D),prefix=1,slots=sl)
        pk=ops.pick(err,rule,512,rep); k,v=mk(1,512,768),mk(1,512,768)
        print("pick plain %.1f leading %.1f"%(replayed(lambda: ops.pick(err,rule,512,rep)),replayed(lambda: ops.pick(err,lead,512,rep))))
        e8=torch.rand(8,N,device=D); r8=ops.PickRule(torch.zeros(8,device=D),torch.full((8,),512,device=D)); p8=torch.zeros(8,3,dtype=torch.int32,device=D)
        print("pick B8 %.1f"%replayed(lambda: ops.pick(e8,r8,512,p8)))
        lost=torch.zeros(1,64,dtype=torch.int64,device=D); z=torch.zeros(1,dtype=torch.int64,device=D)
        print("recompute %.1f"%replayed(lambda: ops.recompute_(mem,((pk.index,pk.count),(lost,z)),.125,sl)))
        ref=mk(1,N,768); x=mk(1,N,768); ln=ops.LayerNorm(mk(768),mk(768),1e-6)
        print("gate_error %.1f +update %.1f rows %.1f add_held %.1f"%(replayed(lambda: ops.gate_error(x,ref,sl,ln)),replayed(lambda: ops.gate_error(x,ref,sl,ln,mem.key)),replayed(lambda: ops.gate_rows(x,ref,pk.index,pk.count,sl,ln)),replayed(lambda: ops.add_held(x,ref,sl))))
        for rows in (64,128):
            for lanes in (32,64,128):
                for warps in (4,8):
                    for stg in (1,2,3):
                        try: t=replayed(lambda: E.exchange_(mem,k,v,pk,.125,1e9,sl,64,rows=rows,lanes=lanes,warps=warps,stages=stg),10)
                        except Exception as e: continue
                        print("%7.2f exchange rows=%d lanes=%d warps=%d stages=%d"%(t,rows,lanes,warps,stg))
